"""Clients for language models other than the one in training."""
