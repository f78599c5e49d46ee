"""Live views of a run: the panel, the status text and the list of runs."""
