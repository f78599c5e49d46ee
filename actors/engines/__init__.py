"""Engines, which generate tokens. `base` is their interface; each other engine implements it."""
