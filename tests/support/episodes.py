"""Tickets and trajectories: what they usually are where a test says nothing else."""

import numpy as np

from evolver_async.schema import Sampling, Sequence, Task, Ticket, Trajectory


def ticket(
    task: Task, *, temperature: float = 1.0, max_tokens: int = 24, **facts: object
) -> Ticket:
    """A rollout of group 0 with a single member; `facts` are its fields that are not as usual."""
    usual: dict[str, object] = {
        "group_id": 0,
        "kind": "rollout",
        "stage": 0,
        "members": [0],
        "guided": [],
        "dynamics_seed": 0,
        "attempt": 0,
        "weights": None,
        "lease_s": 30.0,
        "sampling": Sampling(temperature=temperature, max_tokens=max_tokens),
    }
    return Ticket(task=task, **(usual | facts))


def episode(*sequences: Sequence, turns: int = 1, **facts: object) -> Trajectory:
    """The first member of group 0, of so many turns; `facts` are its fields that are not as usual.

    It ended by itself, had no reward and no experience, and nobody has judged it.
    """
    usual: dict[str, object] = {
        "group_id": 0,
        "member": 0,
        "attempt": 0,
        "actor": "actor-0",
        "incarnation": 0,
        "content": 0,
        "reward": 0.0,
        "success": False,
        "terminated": True,
        "truncated": False,
        "turn_rewards": np.zeros(turns, np.float32),
        "turn_flags": np.zeros(turns, np.uint8),
        "labels": np.zeros(turns, np.int8),
        "label_source": "",
        "experience_ids": [],
        "policy": "learned",
        "timing": {},
    }
    return Trajectory(sequences=list(sequences), **(usual | facts))
