"""The `doctor` command: capabilities of this machine, and requirements of a recipe."""
