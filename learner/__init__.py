"""The learner wing: complete groups in, weight versions out.

`train` is the loop: sample -> select -> collate (strip) -> advantage -> anchor log-probs ->
minibatches of loss -> step -> publish -> done -> checkpoint. What it calls is pure: `selection`
(which groups train), `batch` (groups -> tensors, the only list->tensor border), `advantage`,
`offpolicy` (corrections), `loss`, `supervised`; `optim` alone changes weights.

Letters in names: B rows of a padded micro-batch, T tokens of its longest row, N ACTION tokens,
R rows (sequences) and P trajectories of a whole batch, G members of a group.
"""
