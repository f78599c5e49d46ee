"""Self-Navigating: a pool of experience from earlier groups that guides later episodes."""
