"""Groups with chosen rewards."""

import numpy as np
from episodes import episode

from evolver_async.schema import Group, Role, Sequence, Task

SEQUENCE = Sequence(
    tokens=np.zeros(1, np.int32),
    roles=np.full(1, Role.PROMPT, np.uint8),
    turns=np.full(1, -1, np.int16),
    logprobs=np.zeros(1, np.float32),
    versions=[],
)


def make_group(group_id: int, rewards: list[float]) -> Group:
    trajectories = [
        episode(SEQUENCE, group_id=group_id, member=member, reward=reward, success=reward > 0)
        for member, reward in enumerate(rewards)
    ]
    task = Task(task_id="t", env="bandit", split="train", map_seed=0)
    return Group(
        group_id=group_id, task=task, kind="rollout", stage=0, use=0, trajectories=trajectories
    )
