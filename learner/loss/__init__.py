"""Losses: policy objective, off-policy corrections, preferences and supervised."""
