"""Full-screen view of a run in a terminal: what it reads, its views, and the textual app."""
