"""How weights travel from the learner to the actors: one channel a file, both its ends in it."""
