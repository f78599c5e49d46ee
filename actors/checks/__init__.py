"""Checks of the rollout wing before a run starts: its configuration and its prompts."""
