"""Probes: each uses one capability of the machine once, on a small scale, in its own process."""
