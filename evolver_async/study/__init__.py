"""Studies: grids of runs over seeds, their statistics, tables and plots.

A run of a study is an ordinary run in a directory of its own, started as `evolver-async train`.
"""
