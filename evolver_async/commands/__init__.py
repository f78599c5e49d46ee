"""The commands of `evolver-async`, each a function from parsed arguments to an exit code."""
