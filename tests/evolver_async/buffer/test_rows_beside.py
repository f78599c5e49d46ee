"""Rows of files among the groups of an rl stage: their share, their groups, their durability."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_world import World, config

from actors.checks.config import check
from evolver_async.buffer.tasks.data_files import ROWS, DataTasks, check_examples, data_tasks
from evolver_async.buffer.tasks.logged import prompt_hash, row_of, trajectory_of
from evolver_async.config import ConfigError, DataConfig
from evolver_async.config.load import load
from evolver_async.schema import Ticket


def logged(prompt: list[int], *tokens: int, **others: Any) -> dict[str, Any]:
    row = {"prompt_token_ids": prompt, "token_ids": [*tokens], "logprobs": [-0.5] * len(tokens)}
    return {**row, "reward": 1.0, **others}


SAID = {"prompt": "a?", "completion": "b"}
ROWS_OF = [logged([5, 6], n, 2) for n in range(5)] + [SAID] + [logged([7], n) for n in range(6)]


def file_of(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "logs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def mixed(directory: Path, weight: float, **keys: Any) -> World:
    directory.mkdir(exist_ok=True)
    path = file_of(directory, ROWS_OF)
    settings = config(group_size=4, groups_per_step=8, max_staleness=3, **keys)
    settings = replace(settings, data=DataConfig(path=str(path), weight=weight))
    world = World(directory / "journal", settings)
    world.resume()
    return world


def is_row(ticket: Ticket) -> bool:
    return ticket.task.origin == "recorded"


def test_rows_of_one_prompt_are_groups_of_the_size_of_a_stages_groups(tmp_path: Path) -> None:
    tasks = data_tasks(DataConfig(path=str(file_of(tmp_path, ROWS_OF))), "frozen_lake", {}, 4)
    assert isinstance(tasks, DataTasks)
    found = [tasks.task("train", number) for number in range(tasks.count("train"))]
    assert [tasks.size(task) for task in found] == [4, 1, 1, 4, 2]
    filled = [tasks.filled(task, tasks.size(task)) for task in found]
    assert all(not task.row for task in found), "journals hold them"
    places = [place.rpartition(" ")[2] for task in filled for place, _, _ in task.row[ROWS]]
    assert places == [str(number) for number in (*range(1, 13),)]
    assert [row for task in filled for _, _, row in task.row[ROWS]] == ROWS_OF
    assert [task.task_id for task in found] == [task.row[ROWS][0][0] for task in filled]


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0])
def test_rows_have_their_share_and_rollouts_the_rest(tmp_path: Path, weight: float) -> None:
    world, met = mixed(tmp_path / "w", weight), list[Ticket]()
    for take in range(12):
        tickets = world.lease(credit=40)
        for ticket in tickets:
            assert ticket.kind == ("demo" if is_row(ticket) else "rollout")
            assert len(ticket.members) == (len(ticket.task.row[ROWS]) if is_row(ticket) else 4)
        world.finish(tickets)
        met += tickets
        world.done(take, [group.group_id for group in world.sample(take)], take + 1)
    share = sum(map(is_row, met)) / len(met)
    assert abs(share - weight) <= 1 / len(met) + 1e-9 or abs(share - weight) < 0.03
    assert weight < 1 or share == 1
    rows = [ticket.task.task_id for ticket in met if is_row(ticket)]
    assert len({*rows[:5]}) == 5, "each once a pass"


def test_what_was_granted_of_rows_survives_a_kill(tmp_path: Path) -> None:
    through, killed = mixed(tmp_path / "a", 0.5), mixed(tmp_path / "b", 0.5)
    found = []
    for world in (through, killed):
        first = world.lease(credit=5)
        world.finish(first[:-1])
        if world is killed:
            world.kill()
            world.resume(lineage=1)
        found.append([*first, *world.lease(credit=5, peer="actor-1")])
    plain = [
        [(one.group_id, one.task.task_id.rpartition(",")[2], one.members) for one in tickets]
        for tickets in found
    ]
    assert plain[0] == plain[1] and any(is_row(one) for one in found[0])


def test_rows_never_become_too_old(tmp_path: Path) -> None:
    world = mixed(tmp_path / "w", 0.5)
    tickets = world.lease(credit=40)
    world.finish([one for one in tickets if is_row(one)])
    held = {group.group_id for group in world.replay.by_state["ready"].values()}
    assert held and not any(map(world.replay.too_old, world.replay.by_state["ready"].values()))
    assert world.replay.outstanding() == len(tickets) == world.replay.limit()


def test_several_turns_are_numbered_by_their_runs_of_sampled_tokens() -> None:
    parts = [
        {"tokens": [1, 2, 3, 4], "mask": [0, 1, 0, 1], "logprobs": [0, -1, 0, -2]},
        {"tokens": [1, 9], "roles": [0, 2], "logprobs": [-3]},
    ]
    found = trajectory_of({"sequences": parts, "reward": 0}, {})
    assert [one.turns.tolist() for one in found.sequences] == [[-1, 0, -1, 1], [-1, 2]]
    assert [one.logprobs.tolist() for one in found.sequences] == [[0, -1, 0, -2], [0, -3]]
    assert found.turn_rewards == [0, 0, 0] and not found.success
    assert prompt_hash({"sequences": parts}, {}) == prompt_hash(logged([1], 7), {})


def test_a_trajectory_is_the_same_behind_its_row(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config())
    world.resume()
    (ticket,) = world.lease()
    world.push(ticket, 0, reward=0.25)
    (made,) = world.store.cached[ticket.group_id].values()
    found = trajectory_of(json.loads(json.dumps(row_of(made))), {})
    assert (found.reward, found.success) == (made.reward, made.success)
    assert np.array_equal(found.turn_rewards, made.turn_rewards)
    for one, other in zip(found.sequences, made.sequences, strict=True):
        for name in ("tokens", "roles", "turns", "logprobs"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logprobs": [-0.5]}, "logprobs"),
        ({"logprobs": [0.5, -0.5]}, "logprobs"),
        ({"logprobs": [-0.5, None]}, "logprobs"),
        ({"token_ids": [1.5, 2]}, "tokens"),
        ({"token_ids": [-1, 2]}, "tokens"),
        ({"prompt_token_ids": None}, "prompt_token_ids"),
        ({"reward": None}, "reward"),
        ({"turn_rewards": [1.0, 1.0]}, "turn_rewards"),
    ],
)
def test_what_a_trajectory_lacks_is_told_by_row(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = file_of(tmp_path, [logged([1], 1, 2), logged([1], 1, 2) | change])
    tasks = data_tasks(DataConfig(path=str(path)), "frozen_lake", {}, 2)
    assert isinstance(tasks, DataTasks)
    with pytest.raises(ConfigError, match=rf"logs\.jsonl, line 2: .*{named}"):
        check_examples(tasks, "rl")


@pytest.mark.parametrize(
    ("kind", "weight", "row"),
    [
        ("rl", 0.5, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("rl", 1, {"text": "a"}),
        ("rl", 0.5, {"seed": 1, "reference": ["up"]}),
        ("sft", 0, logged([1], 2)),
        ("dpo", 0, logged([1], 2)),
    ],
)
def test_rows_that_a_stage_cannot_learn_are_refused_before_a_start(
    tmp_path: Path, kind: str, weight: float, row: dict[str, Any]
) -> None:
    data = f"{{path: {file_of(tmp_path, [row])}, weight: {weight}}}"
    settings = load(None, [f"stages=[{{kind: {kind}, steps: 1, data: {data}}}]"])
    with pytest.raises(ConfigError, match=r"data\.path"):
        check(settings)


def test_a_ticket_with_rows_travels(tmp_path: Path) -> None:
    world = mixed(tmp_path / "w", 1.0)
    for ticket in world.lease(credit=3):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket) == ticket
