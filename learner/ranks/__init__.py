"""The ranks of a learner: their process group and what they compute together."""
