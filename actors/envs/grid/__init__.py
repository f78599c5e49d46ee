"""Environments on a grid: FrozenLake, CliffWalking, Sokoban."""
