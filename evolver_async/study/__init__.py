"""Tools around a run: they read what it wrote and never take part in it."""
