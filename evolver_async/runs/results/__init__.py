"""Results of a run, read from its directory: metrics, trajectories, checkpoints, its end."""
