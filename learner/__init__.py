"""The learner wing: complete groups in, weight versions out.

`train` is the loop: sample -> select -> collate (strip) -> advantage -> anchor log-probs ->
minibatches of loss -> step -> publish -> done -> checkpoint. `update` is one of its steps, out of
parts that are mostly pure: `selection` (which groups train), `collate` (groups -> a `batch`, the
only list->array border; strips experience), `scoring` (log-probs before the updates), `credit`
with `advantage`, `objective` with `offpolicy` (corrections), `loss` and `accounting` (what it
measures), `supervised`; `optim` alone changes weights.

Letters in names: B rows of a padded micro-batch, T tokens of its longest row, N ACTION tokens,
R rows (sequences), P trajectories and U turns of a whole batch, G members of a group.
"""
