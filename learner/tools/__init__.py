"""Commands on checkpoints: `prepare` before a run and `export` after it."""
