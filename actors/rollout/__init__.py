"""Rollouts: one group of episodes, one episode, its conversation and its environment."""
