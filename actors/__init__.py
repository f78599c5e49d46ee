"""Rollout wing: environments, engines, and the processes that run episodes with them."""
