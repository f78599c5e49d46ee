"""Optimization: the model, its log-probs, AdamW and the updates of a step."""
