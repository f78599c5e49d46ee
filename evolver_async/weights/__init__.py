"""Weight channels from the learner to the actors: one module a channel, with both its ends."""
