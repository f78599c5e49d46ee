"""World outside a step: requests to the buffer, evaluations, checkpoints, calls of other ranks."""
