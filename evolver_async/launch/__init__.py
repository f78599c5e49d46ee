"""Launchers, the run directory, the registry of roles and the checks before a start."""
