"""Checkpoints: atomic directories, their tensors and their history."""
