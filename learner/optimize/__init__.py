"""Optimization: models, their log-probs and values, AdamW, and the updates of a step."""
