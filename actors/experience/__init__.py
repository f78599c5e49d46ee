"""Self-Navigating: what earlier groups found out, kept, found again, and told to later episodes."""
