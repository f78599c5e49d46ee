"""Advantages: group-relative estimators, GAE, the critic, shaping and assignment to tokens."""
