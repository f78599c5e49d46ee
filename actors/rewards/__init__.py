"""Terms of the reward: functions of a finished episode, each with a weight.

`scorer.py` sums them and decides the success, `terms.py` makes the configured ones, `facts.py` is
what they read. `answers.py` compares replies with answers, `program_tests.py` runs a row's
tests, `grader.py` asks an endpoint, `own_rewards.py` calls functions of a user's own. What can hang
runs in a process that can be killed: `workers.py` seen from the actor, `term_process.py` from
inside.
"""
