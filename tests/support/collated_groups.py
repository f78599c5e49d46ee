"""Groups of trajectories and the batches that they become."""

import numpy as np

from evolver_async.lineages import Fork
from evolver_async.schema import Group, Role, Sequence, Task, Trajectory, VersionRun, WeightId
from learner.data.batch import Batch
from learner.data.collate import Internalise, Lag, collate, lag_table

VOCABULARY = 17


ALWAYS, NEVER = Internalise(1.0, 0), Internalise(0.0, 0)


def make_sequence(
    rng: np.random.Generator, length: int, guided: bool, scripted: bool, turns: int
) -> Sequence:
    roles = rng.choice(
        [Role.EXPERIENCE, Role.PROMPT, Role.ACTION, Role.OBSERVATION][0 if guided else 1 :],
        size=length,
    ).astype(np.uint8)
    roles[0] = Role.EXPERIENCE if guided else Role.PROMPT
    roles[-1] = Role.OBSERVATION  # something is left after stripping
    action = roles == Role.ACTION
    runs, left = [], int(action.sum())
    while left and not scripted:
        tokens = int(rng.integers(1, left + 1))
        weights = WeightId(lineage=1, step=int(rng.integers(0, 9)))
        runs.append(VersionRun(weights=weights, tokens=tokens))
        left -= tokens
    return Sequence(
        tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        roles=roles,
        turns=np.where(action, rng.integers(0, turns, length), -1).astype(np.int16),
        logprobs=np.where(action, -rng.exponential(2, length), 0).astype(np.float32),
        versions=runs,
    )


def make_groups(
    seed: int, groups: int, members: int, *, sequences: int = 2, scripted: bool = False
) -> list[Group]:
    """Trajectories of random sequences, about half of which hold experience."""
    rng = np.random.default_rng(seed)

    def trajectory(group: int, member: int) -> Trajectory:
        turns = int(rng.integers(1, 5))
        return Trajectory(
            group_id=group,
            member=member,
            attempt=0,
            actor="actor-0",
            incarnation=0,
            content=0,
            sequences=[
                make_sequence(
                    rng, int(rng.integers(2, 20)), bool(rng.random() < 0.5), scripted, turns
                )
                for _ in range(rng.integers(1, sequences + 1))
            ],
            reward=float(rng.normal()),
            success=False,
            terminated=True,
            truncated=False,
            turn_rewards=rng.normal(size=turns).astype(np.float32),
            turn_flags=np.zeros(turns, np.uint8),
            labels=rng.integers(-1, 2, turns).astype(np.int8),
            label_source="",
            experience_ids=[],
            policy="scripted" if scripted else "learned",
            timing={},
        )

    task = Task(task_id="t", env="bandit", split="train", map_seed=0)
    return [
        Group(
            group_id=group,
            task=task,
            kind="rollout",
            stage=0,
            use=0,
            trajectories=[trajectory(group, member) for member in range(members)],
        )
        for group in range(groups)
    ]


def lags_of(groups: list[Group]) -> dict[WeightId, Lag]:
    return lag_table(groups, WeightId(lineage=1, step=9), {1: Fork(lineage=1, parent=0, step=0)})


def collated(groups: list[Group], strip: Internalise = ALWAYS) -> Batch:
    return collate(groups, lags_of(groups), strip)
