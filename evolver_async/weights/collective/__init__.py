"""Weights by broadcast over gloo or NCCL: sender, receiver, process groups, event log."""
