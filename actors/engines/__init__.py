"""Engines: what generates tokens. `base` is the promise, each other module one way to keep it."""
