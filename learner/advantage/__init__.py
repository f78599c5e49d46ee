"""Advantages: rewards, group-relative estimators, GAE, and assignment to tokens."""
