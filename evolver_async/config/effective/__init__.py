"""Values by which a stage runs: keys that do nothing, and numbers without room."""
