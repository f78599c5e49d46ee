"""Clients of language models: endpoints of other models, and the policy itself."""
