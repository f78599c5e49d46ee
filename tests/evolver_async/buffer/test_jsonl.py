"""Tasks from a file and from mixtures: nothing wrong gets in, no task is in two splits."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from buffer_world import World, config
from hypothesis import given
from hypothesis import strategies as st

from actors.checks.config import check
from evolver_async.buffer.stages import source_of
from evolver_async.buffer.tasks.jsonl import load_tasks
from evolver_async.buffer.tasks.source import MixturePart, TaskSource, held_out_task
from evolver_async.buffer.tasks.stream import Cursor, TaskStream
from evolver_async.config import ConfigError
from evolver_async.config import TasksConfig as TasksSection
from evolver_async.config.load import dump, from_dict, load, to_dict
from evolver_async.launch import creation

BOTH = [{"query": "a", "split": "train"}, {"query": "b", "split": "test"}]
STAGE = "stages=[{steps: 1}]"


def written(path: Path, rows: list[Any]) -> Path:
    """A file with these rows, or raw lines."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_row_says_what_differs_from_the_configuration(tmp_path):
    rows = [
        {"query": "walk", "seed": 7, "split": "train", "params": {"hints": False}},
        {"env": "bandit", "split": "train", "params": {"high_probability": 0.5}, "id": "b"},
        "",
        {"query": "run", "split": "test", "reference": ["left", "up"]},
    ]
    found = load_tasks(written(tmp_path / "t", rows), "frozen_lake", {"size": 3})
    walk, bandit = found["train"]
    (run,) = found["test"]
    assert (walk.env, walk.map_seed, walk.query) == ("frozen_lake", 7, "walk")
    assert walk.params == {"size": 3, "hints": False}
    assert bandit.task_id == "bandit/train/b" and bandit.params == {"high_probability": 0.5}
    assert run.reference == ["left", "up"] and run.params == {"size": 3}
    assert run.task_id.startswith("frozen_lake/test/")


@pytest.mark.parametrize(
    "row, problem",
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        ('{"query": 3}', "line 2: .*query"),
        ({"qeury": "x"}, "line 2: .*qeury"),
        ({"split": "dev"}, "line 2: .*dev"),
        ({"seed": -1}, "line 2: seed: -1"),
        ({"seed": 1 << 63}, "line 2: "),
        ('{"params": {"p": 1e999}}', "line 2: "),
        ({"params": {"n": 1 << 64}}, r"line 2: params\.n: must be in -2\*\*63"),
        ('{"params": {"n": ' + "[" * 20 + "]" * 20 + "}}", r"line 2: params\.n.*: nested deeper"),
        ({"query": "x" * 40_000}, "line 2: 400.. bytes"),
        ({"query": "a"}, "line 2: the same task as in line 1"),
        ({"query": "a", "split": "test"}, "line 2: the same task as in line 1"),
        ({"query": "c", "split": "train", "id": "one"}, "line 2: the same task as in line 1"),
        ("[" * 5000, "line 2: "),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, row, problem):
    first = {"query": "a", "split": "train", "id": "one"}
    if "same task" in problem and isinstance(row, dict) and row.get("query") == "a":
        first = {"query": "a", "split": "train"}
    path = written(tmp_path / "t", [first, row])
    with pytest.raises(ConfigError, match=rf"^tasks\.path: {path}, {problem}"):
        load_tasks(path, "frozen_lake", {})


def test_defaults_count_towards_the_bytes_of_a_row(tmp_path):
    path = written(tmp_path / "t", [{"query": "a"}])
    with pytest.raises(ConfigError, match=r"line 1: params: 400.. bytes, at most 32768"):
        load_tasks(path, "frozen_lake", {"text": "x" * 40_000})


def test_a_file_without_tasks_of_a_split_or_none_at_all_is_refused(tmp_path):
    for rows, missing in ((BOTH[:1], "test split, for eval.split"), (BOTH[1:], "train split")):
        path = written(tmp_path / "t", rows)
        with pytest.raises(
            ConfigError, match=rf"^tasks\.path: {path} has no task of the {missing}"
        ):
            source_of(load(None, [STAGE, f"tasks.path={path}"]))
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*No such file"):
        load_tasks(tmp_path / "absent", "bandit", {})


def test_content_alone_decides_the_split_that_is_not_given(tmp_path):
    rows = [{"query": f"question {number}"} for number in range(2000)]
    forwards = load_tasks(written(tmp_path / "t", rows), "bandit", {})
    backwards = load_tasks(written(tmp_path / "t", rows[::-1]), "bandit", {})
    queries = {split: {task.query for task in tasks} for split, tasks in forwards.items()}
    assert queries == {s: {task.query for task in tasks} for s, tasks in backwards.items()}
    assert sum(map(len, queries.values())) == 2000, "a task is in two splits"
    for split in ("validation", "test"):
        share = len(queries[split]) / 2000
        assert share == pytest.approx(1 / 8, abs=5 * math.sqrt(1 / 8 * 7 / 8 / 2000))


def test_the_configuration_changes_neither_the_id_nor_the_split_of_a_row(tmp_path):
    rows = [{"query": f"question {number}", "params": {"x": number}} for number in range(50)]
    path = written(tmp_path / "t", rows)

    def named(env: str, params: dict[str, Any]) -> list[str]:
        found = load_tasks(path, env, params).values()
        return [task.task_id.removeprefix(f"{env}/") for tasks in found for task in tasks]

    assert named("maze", {"size": 4}) == named("maze", {"size": 8}) == named("pond", {})
    doubled = written(tmp_path / "d", [{}, {"params": {"size": 4}}])
    with pytest.raises(ConfigError, match="line 2: the same task as in line 1"):
        load_tasks(doubled, "maze", {"size": 4})


def test_a_run_with_a_file_of_tasks_is_resumed_with_other_parameters(tmp_path):
    path = written(tmp_path / "t", [{"seed": n, "split": "train"} for n in range(8)] + [BOTH[1]])
    settings = dataclasses.replace(config(), tasks=TasksSection(path=str(path)))
    world = World(tmp_path / "journal", settings)
    world.resume()
    world.finish(world.lease(credit=2))
    world.store.journal.close()
    env = dataclasses.replace(settings.env, params={"hints": False})
    world.settings = dataclasses.replace(settings, env=env)
    world.open()
    assert len(world.sample(0)) == 2


def test_a_stage_meets_every_row_of_its_file_once_a_pass(tmp_path):
    rows = [{"query": f"{n}", "split": "train"} for n in range(5)]
    path = written(tmp_path / "t", [*rows, BOTH[1]])
    source = source_of(load(None, [STAGE, f"tasks.path={path}", "env.name=bandit"]))
    tasks, met = TaskStream(0, source), []
    for _ in range(10):
        queued = tasks.peek()
        assert queued is not None
        tasks.take(queued.task)
        met.append(queued.task.query)
    assert sorted(met[:5]) == sorted(met[5:]) == [f"{n}" for n in range(5)]
    assert [held_out_task(source, n).query for n in range(2)] == ["b", "b"]


def test_a_run_keeps_its_own_copy_of_its_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(creation, "_prepare", lambda config, run_dir: None)
    one, two = written(tmp_path / "one", BOTH), written(tmp_path / "two", BOTH)
    stages = f"[{{steps: 1}}, {{steps: 1, override: {{tasks: {{path: {two}}}}}}}]"
    arguments = ["env.name=bandit", f"tasks.path={one}", f"stages={stages}"]
    config, run_dir = creation.create(
        load(None, [*arguments, f"run.dir={tmp_path}", "run.name=r"]), None
    )
    one.write_text("changed")
    two.unlink()
    check(load(run_dir / "config.yaml"))
    assert config.tasks.path == str(run_dir / "tasks_0.jsonl")
    assert config.stages[1].override["tasks"]["path"] == str(run_dir / "tasks_1.jsonl")
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*line 1"):
        check(load(None, [*arguments[:2], STAGE]))


# ---- mixtures


def test_few_held_out_tasks_are_met_again_with_other_dynamics(tmp_path):
    rows = [{"seed": n, "split": "test" if n < 2 else "train"} for n in range(8)]
    path = written(tmp_path / "t", rows)
    settings = dataclasses.replace(config(), tasks=TasksSection(path=str(path)))
    world = World(tmp_path / "journal", settings)
    world.resume()
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(0)]
    world.done(0, groups, version=1, episodes=6)
    tickets = [ticket for ticket in world.lease(credit=6) if ticket.kind == "eval"]
    assert [ticket.task.map_seed for ticket in tickets] == 3 * [0, 1]
    assert len({ticket.dynamics_seed for ticket in tickets}) == 6


@given(st.lists(st.floats(0.05, 5.0), min_size=1, max_size=5), st.integers(0, 10_000))
def test_any_run_of_tasks_has_the_shares_of_the_weights(weights, start):
    parts = tuple(MixturePart(f"env{n}", {"n": n}, weight) for n, weight in enumerate(weights))
    source = TaskSource(env="", params={}, train=0, mixture=parts)
    met = Counter(source.task("train", start + n).env for n in range(1000))
    for part in parts:
        share = part.weight / sum(weights)
        assert met[part.env] / 1000 == pytest.approx(share, abs=0.01)


def test_a_finite_mixture_is_met_pass_after_pass_and_continues_after_a_restart():
    parts = (
        MixturePart("maze", {"size": 3}, 3.0),
        MixturePart("maze", {"size": 4}),
        MixturePart("pond", {}),
    )
    source = TaskSource(env="", params={}, train=10, mixture=parts)
    tasks, met = TaskStream(1, source), []
    for _ in range(20):
        queued = tasks.peek()
        assert queued is not None
        tasks.take(queued.task)
        met.append(queued.task)
        saved = msgspec.msgpack.encode(tasks.cursor)
        tasks = TaskStream(1, source)
        tasks.restore(msgspec.msgpack.decode(saved, type=Cursor))
    ids = [task.task_id for task in met]
    assert len(set(ids[:10])) == 10 and sorted(ids[:10]) == sorted(ids[10:])
    assert {(task.env, task.params.get("size")) for task in met} == {
        ("maze", 3),
        ("maze", 4),
        ("pond", None),
    }


def test_every_environment_of_a_mixture_is_checked():
    def mixture(*parts: str) -> list[str]:
        return [STAGE, f"tasks.mixture=[{', '.join(parts)}]"]

    lake = "{env: frozen_lake, params: {size: 3}}"
    check(load(None, mixture(lake, "{env: bandit, weight: 2}")))
    with pytest.raises(ValueError, match=r"^env\.params\.sise: "):
        check(load(None, mixture(lake, "{env: frozen_lake, params: {sise: 3}}")))
    with pytest.raises(ValueError, match=r"^env\.name: no environment 'maze'"):
        check(load(None, mixture(lake, "{env: maze}")))
    with pytest.raises(ValueError, match=r"^stages\[0\]\.kind: .*world_model needs .*bandit"):
        check(load(None, [*mixture(lake, "{env: bandit}"), "stages.0.kind=world_model"]))


def test_a_mixture_survives_file_and_wire_and_its_secrets_stay_references(tmp_path, monkeypatch):
    part = "{env: bandit, params: {api_key: '${oc.env:SOME_KEY}'}, weight: 2}"
    config = load(None, [STAGE, f"tasks.mixture=[{part}]"])
    dump(config, tmp_path / "config.yaml")
    assert "${oc.env:SOME_KEY}" in (tmp_path / "config.yaml").read_text()
    assert load(tmp_path / "config.yaml") == config == from_dict(to_dict(config))
    with pytest.raises(ConfigError, match=r"^tasks\.mixture\[0\]\.params\.api_key: looks like"):
        load(None, ["tasks.mixture=[{env: bandit, params: {api_key: abc}}]"])
