"""Environments: `base.py` says what one is and finds them by name, each other file holds one."""
