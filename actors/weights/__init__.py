"""Weights of an actor: ways from the channel into an engine, and proof of their arrival."""
