"""Training once more on the recorded takes of a run, without buffer and actors."""
