"""Environments: `base.py` holds the protocol and finds them by name, each other file holds one."""
