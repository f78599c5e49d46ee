"""The `doctor` command: what this machine can run, and whether it can run a recipe."""
