"""Workshop: items made by rules that all tasks share and none states.

`items` holds the items of each split and the action that each name wants, `env` is the environment.
"""
