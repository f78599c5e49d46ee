"""Learner wing: complete groups in, weight versions out.

`train` is the loop around `step`. A step is a pipeline of frozen values: select → collate →
log-probs → values → rewards → advantages → updates. `data` holds batches, `advantage` and `loss`
are pure, `optimize` holds the models and alone changes weights, `ranks` shards them over processes,
`diagnostics` measures, and `run` is the world outside of a step.

Letters in names: B rows of a padded micro-batch, T tokens of its longest row, N ACTION tokens,
R rows (sequences), P trajectories and U turns of a whole batch, G members of a group.
"""
