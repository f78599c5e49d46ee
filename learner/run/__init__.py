"""The world outside a step: the buffer's replies, evaluations, checkpoints, other ranks."""
