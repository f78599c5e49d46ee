"""Ranks of a learner: their process group and collective operations."""
