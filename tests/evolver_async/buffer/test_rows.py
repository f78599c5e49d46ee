"""Tasks of rows and of mixtures: nothing wrong gets in, no task is in two splits."""

import dataclasses
import json
import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
import pytest
from buffer_world import World, config
from episodes import ticket as make_ticket
from hypothesis import given
from hypothesis import strategies as st

from actors.checks.config import check
from evolver_async.buffer.stages import evaluation_digest, source_of
from evolver_async.buffer.tasks import row_files, row_tables
from evolver_async.buffer.tasks.row_files import rows_of
from evolver_async.buffer.tasks.rows import ROW_BYTES, given_tasks
from evolver_async.buffer.tasks.stream import Cursor, TaskStream
from evolver_async.buffer.tasks.task_source import MixturePart, TaskSource, held_out_task
from evolver_async.buffer.tickets import REPLY_BYTES
from evolver_async.config import ConfigError
from evolver_async.config import TasksConfig as TasksSection
from evolver_async.config.load import dump, from_dict, load, stage_config, to_dict
from evolver_async.launch import creation
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, split_of
from evolver_async.wire.envelope import LIMITS, Envelope, pack, unpack
from evolver_async.wire.messages import Tickets

BOTH = [{"query": "a", "split": "train"}, {"query": "b", "split": "test"}]
STAGE = "stages=[{steps: 1}]"


def written(path: Path, rows: list[Any]) -> Path:
    """A file with these rows, or raw lines."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def tasks_of(
    path: Path, env: str = "bandit", params: dict[str, Any] | None = None, **keys: Any
) -> dict[str, list[Task]]:
    """The tasks of rows by split; `keys` of the section `tasks`."""
    given = given_tasks(rows_of(TasksSection(path=str(path), **keys)), env, params or {}, "")
    return {
        split: [given.task(split, number) for number in range(given.count(split))]
        for split in SPLITS
        if given.count(split)
    }


def all_of(found: dict[str, list[Task]]) -> list[Task]:
    return [task for tasks in found.values() for task in tasks]


def test_a_row_says_what_differs_from_the_configuration(tmp_path):
    rows = [
        {"query": "walk", "seed": 7, "split": "train", "params": {"hints": False}, "more": [1]},
        {"env": "bandit", "split": "train", "params": {"high_probability": 0.5}, "id": "b"},
        "",
        {"query": "run", "split": "test", "reference": ["left", "up"]},
    ]
    found = tasks_of(written(tmp_path / "t", rows), "frozen_lake", {"size": 3})
    walk, bandit = found["train"]
    (run,) = found["test"]
    assert (walk.env, walk.map_seed, walk.query) == ("frozen_lake", 7, "walk")
    assert walk.params == {"size": 3, "hints": False} and walk.row == {"more": [1]}
    assert bandit.task_id == "bandit/train/b" and bandit.params == {"high_probability": 0.5}
    assert run.reference == ["left", "up"] and run.params == {"size": 3}
    assert run.task_id.startswith("frozen_lake/test/")


@pytest.mark.parametrize(
    "row, problem",
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        ('{"query": 3}', "line 2: .*query"),
        ({"qeury": "x"}, "line 2: has none of the columns of a task .*qeury"),
        ({"split": "some"}, "line 2: column split: 'some'"),
        ('{"query": "b", "query": "c"}', "line 2: the key query is there twice"),
        ('{"query": "b", "params": {"p": 1, "p" : 2}}', "line 2: the key p is there twice"),
        ({"query": "b", "more": 1 << 64}, r"line 2: column more: must be in -2\*\*63"),
        ({"query": "b", "more": [1 << 64]}, r"line 2: column more: .* beyond 64 bits"),
        ({"seed": -1}, "line 2: seed: -1"),
        ({"seed": 1 << 63}, "line 2: "),
        ('{"params": {"p": 1e999}}', "line 2: "),
        ({"params": {"n": 1 << 64}}, r"line 2: column params: .* beyond 64 bits"),
        ('{"params": {"n": ' + "[" * 20 + "]" * 20 + "}}", r"line 2: column params: nested deeper"),
        ({"params": {"text": "x" * 40_000}}, "line 2: params: 400.. bytes"),
        ({"query": "x" * ROW_BYTES}, "line 2: 10485.. bytes"),
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
        tasks_of(path)


def test_a_file_without_tasks_of_a_split_or_none_at_all_is_refused(tmp_path):
    for rows, missing in ((BOTH[:1], "test split, for eval.split"), (BOTH[1:], "train split")):
        path = written(tmp_path / "t", rows)
        with pytest.raises(
            ConfigError, match=rf"^tasks\.path: {path} has no task of the {missing}"
        ):
            source_of(load(None, [STAGE, f"tasks.path={path}"]))
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*No such file"):
        tasks_of(tmp_path / "absent")


def test_content_alone_decides_the_split_that_is_not_given(tmp_path):
    rows = [{"query": f"question {number}"} for number in range(2000)]
    forwards = tasks_of(written(tmp_path / "t", rows))
    backwards = tasks_of(written(tmp_path / "t", rows[::-1]))
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
        found = tasks_of(path, env, params).values()
        return [task.task_id.removeprefix(f"{env}/") for tasks in found for task in tasks]

    assert named("maze", {"size": 4}) == named("maze", {"size": 8}) == named("pond", {})


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
    held_out = written(tmp_path / "held_out", [{"query": "c"}])
    tasks = f"path: {two}, test: {held_out}"
    stages = f"[{{steps: 1}}, {{steps: 1, override: {{tasks: {{{tasks}}}}}}}]"
    arguments = ["env.name=bandit", f"tasks.path={one}", f"stages={stages}"]
    config, run_dir = creation.create(
        load(None, [*arguments, f"run.dir={tmp_path}", "run.name=r"]), None
    )
    one.write_text("changed")
    two.unlink()
    check(load(run_dir / "config.yaml"))
    assert config.tasks.path == str(run_dir / "tasks_0")
    assert config.stages[1].override["tasks"] == {"path": str(run_dir / "tasks_1")}
    staged = stage_config(load(run_dir / "config.yaml"), 1)
    assert [task.query for task in source_of(staged).examples("test")] == ["b", "c"]
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*line 1"):
        check(load(None, [*arguments[:2], STAGE]))
    with pytest.raises(ConfigError, match=r"^tasks\.prompt: .*indexed with"):
        source_of(load(None, [STAGE, f"tasks.path={run_dir}/tasks_0", "tasks.prompt=query"]))


def test_a_process_reads_a_file_once_and_a_run_s_own_rows_never(tmp_path, monkeypatch):
    path = written(tmp_path / "t", BOTH)
    read, opened = row_files.lines_of, list[Path]()
    monkeypatch.setattr(
        row_files, "lines_of", lambda path, at: (opened.append(path), read(path, at))[1]
    )
    config = load(None, [STAGE, f"tasks.path={path}", "env.name=bandit"])
    for _ in range(3):
        check(config)
        evaluation_digest(config)
    rows_of(config.tasks).save(tmp_path / "own")
    own = load(None, [STAGE, f"tasks.path={tmp_path}/own", "env.name=bandit"])
    assert evaluation_digest(own) == evaluation_digest(config) and opened == [path]
    written(path, [*BOTH, {"query": "c", "split": "test"}])
    assert source_of(config).given.count("test") == 2, "the file has changed"
    assert evaluation_digest(own) != evaluation_digest(config)


# ---- rows of any columns


def test_a_column_of_prompts_makes_prompt_tasks_with_all_columns(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    talk = [system, {"role": "user", "content": "2 + 2?"}]
    rows = [
        {"question": "1 + 1?", "answer": 2, "level": None, "tags": {"a": [0.5]}, "part": "train"},
        {"question": talk, "answer": ["4", "four"], "part": "dev"},
        {"question": "3 + 3?", "part": "test"},
    ]
    path = written(tmp_path / "t.jsonl", rows)
    found = tasks_of(path, "quiz", {"x": 1}, prompt="question", split="part")
    (first,), (second,), (third,) = found["train"], found["validation"], found["test"]
    assert first.prompt == [{"role": "user", "content": "1 + 1?"}] and second.prompt == talk
    assert [first.row, second.row, third.row] == rows
    assert [first.reference, second.reference, third.reference] == [["2"], ["4", "four"], None]
    assert (first.env, first.params, first.query) == ("quiz", {"x": 1}, "")


@pytest.mark.parametrize("kind", ["parquet", "saved", "splits"])
def test_all_kinds_of_files_make_the_same_tasks(tmp_path, kind):
    rows = [{"q": f"{n} + 1?", "answer": n, "when": None} for n in range(50)]
    table = datasets.Dataset.from_list(rows)
    expected = tasks_of(written(tmp_path / "t.jsonl", rows), prompt="q")
    if kind == "parquet":
        (tmp_path / "p").mkdir()
        for shard in range(2):
            table.shard(2, shard, contiguous=True).to_parquet(tmp_path / "p" / f"{shard}.parquet")
        path = tmp_path / "p"
    elif kind == "saved":
        table.save_to_disk(path := tmp_path / "saved")
    else:
        ids = {split: {task.row["answer"] for task in tasks} for split, tasks in expected.items()}
        parts = {
            split: table.filter(lambda row, mine=mine: row["answer"] in mine)
            for split, mine in ids.items()
        }
        datasets.DatasetDict(parts).save_to_disk(path := tmp_path / "splits")
    found = tasks_of(path, prompt="q")

    def without_numbers(tasks: list[Task]) -> list[Task]:
        return [msgspec.structs.replace(task, map_seed=0) for task in tasks]

    for split in SPLITS:
        assert without_numbers(found[split]) == without_numbers(expected[split])


def test_values_of_tables_become_plain_and_bytes_are_refused(tmp_path):
    moment = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)
    row = {"q": "a", "at": moment, "x": np.float32(0.5), "none": float("nan"), "v": [np.int64(3)]}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    (task,) = all_of(tasks_of(tmp_path / "a.parquet", prompt="q"))
    assert task.row == {"q": "a", "at": "2026-05-04T12:30:00Z", "x": 0.5, "none": None, "v": [3]}
    image = {"q": "a", "picture": {"bytes": b"x", "path": "p"}}
    datasets.Dataset.from_list([image]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        ConfigError, match=r"^tasks\.path: .*b\.parquet: column picture: holds bytes"
    ):
        tasks_of(tmp_path / "b.parquet", prompt="q")


def test_rows_of_a_table_can_be_tasks_of_environments(tmp_path):
    rows = [
        {"params": {"low": 0.1, "high_probability": None}, "split": "train", "id": None},
        {"params": {"low": None, "high_probability": 0.5}, "split": "test", "id": "x"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    found = tasks_of(tmp_path / "t.parquet")
    assert found["train"][0].params == {"low": 0.1}
    assert found["test"][0].params == {"high_probability": 0.5}
    assert found["test"][0].task_id == "bandit/test/x"


@pytest.mark.parametrize(
    "content, keys, problem",
    [
        (b'\xef\xbb\xbf{"q": "a"}', {}, r"t\.jsonl, line 1: .*byte order mark"),
        (b'[{"q": "a"}]', {}, r"t\.jsonl, line 1: is a JSON array"),
        (b"PAR1....", {}, r"t\.jsonl is a Parquet file"),
        (b"", {}, r"t\.jsonl: has no rows"),
        (b'{"q": "a"}\n{"q": "b", "q": "c"}', {}, r"t\.jsonl, line 2: the key q is there twice"),
        (b'{"q": "a"}\n\n{"q": null}', {}, r"t\.jsonl, line 3: column q: .* is null"),
        (b'{"q": "a"}\n{"q": " "}', {}, r"t\.jsonl, line 2: column q: is empty"),
        (b'{"q": "a"}\n{"x": 1}', {}, r"t\.jsonl, line 2: there is no column q .* columns are x$"),
        (b'{"q": [{"role": "user"}]}', {}, r"line 1: column q: message 0 must be"),
        (b'{"q": [{"role": "assistant", "content": "a"}]}', {}, "line 1: column q: the last"),
        (b'{"q": [{"role": "me", "content": "a"}]}', {}, "line 1: column q: message 0: role"),
        (b'{"q": "a", "s": "x"}', {"split": "s"}, "line 1: column s: 'x' is none of train"),
        (b'{"q": "a", "s": "x"}', {"split": "t"}, r"line 1: there is no column t .* are q, s$"),
        (b'{"q": "a", "s": "x"}', {"answer": "t"}, "no column t; the columns are q, s$"),
    ],
)
def test_bad_rows_of_prompts_are_named(tmp_path, content, keys, problem):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    key = r"tasks\.answer" if "answer" in keys else r"tasks\.path"
    with pytest.raises(ConfigError, match=rf"^{key}: .*{problem}"):
        tasks_of(path, prompt="q", **keys)


def test_json_lines_called_parquet_are_named(tmp_path):
    path = written(tmp_path / "t.parquet", [{"q": "a"}])
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*t\.parquet is no Parquet file"):
        tasks_of(path, prompt="q")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    datasets.Dataset.from_list([{"q": "a"}]).save_to_disk(tmp_path / "saved")
    monkeypatch.setattr(row_tables, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"datasets, which is not installed: .*async\[data\]"):
        tasks_of(tmp_path / "saved", prompt="q")


def test_equal_prompts_share_a_split_and_have_names_of_their_own(tmp_path):
    prompts = [f"question {n}" for n in range(300)]
    as_messages = [[{"role": "user", "content": one}] for one in prompts]
    path = written(tmp_path / "t.jsonl", [{"q": one} for one in [*prompts, *as_messages]])
    found = tasks_of(path, prompt="q")
    splits = {split: {t.prompt[0]["content"] for t in tasks} for split, tasks in found.items()}
    assert sum(map(len, splits.values())) == 300
    assert len({task.task_id for tasks in found.values() for task in tasks}) == 600
    assert all(split_of(f"user\0{one}") == split for split in splits for one in splits[split])
    assert found == tasks_of(
        written(tmp_path / "u.jsonl", path.read_text().splitlines()), prompt="q"
    )


def test_each_split_can_have_a_file_and_names_of_files_tell_splits(tmp_path):
    (tmp_path / "d").mkdir()
    for name, prompt in (("train-0", "a"), ("train-1", "b"), ("test-0", "c")):
        written(tmp_path / "d" / f"{name}.jsonl", [{"q": prompt}])
    dev = written(tmp_path / "held.jsonl", [{"q": "d"}])
    found = tasks_of(tmp_path / "d", prompt="q", validation=str(dev))
    rows = {split: [task.row["q"] for task in tasks] for split, tasks in found.items()}
    assert rows == {"train": ["a", "b"], "validation": ["d"], "test": ["c"]}
    written(tmp_path / "d" / "more.jsonl", [{"q": "e"}])
    with pytest.raises(ConfigError, match=r"names a split, .*more\.jsonl does not"):
        tasks_of(tmp_path / "d", prompt="q")


def test_few_rows_are_checked_and_a_bad_one_is_named(tmp_path):
    rows = [{"params": {"low": n / 500}, "split": "train"} for n in range(100)]
    path = written(tmp_path / "t", [*rows, {"split": "test"}, {"env": "maze", "split": "test"}])
    source = source_of(load(None, [STAGE, f"tasks.path={path}", "env.name=bandit"]))
    examples = source.examples()
    assert [task.params["low"] for task in examples] == [n // 8 / 500 for n in range(0, 800, 100)]
    assert source.envs == {"bandit", "maze"}
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*t, line 102: env\.name: .*maze"):
        check(load(None, [STAGE, f"tasks.path={path}", "env.name=bandit"]))


def test_a_large_row_travels_in_a_message(tmp_path):
    text = "x" * (ROW_BYTES - 100)
    path = written(tmp_path / "t", [{"q": text}])
    (task,) = all_of(tasks_of(path, prompt="q"))
    numbers = [0.5] * ((ROW_BYTES - 100) // 5)
    path = written(tmp_path / "u", [{"q": "a", "v": numbers}])
    (other,) = all_of(tasks_of(path, prompt="q"))
    for one in (task, other):
        assert len(msgspec.msgpack.encode(one)) < LIMITS.header_bytes - REPLY_BYTES
        ticket = make_ticket(one)
        frames = pack(Envelope("run", "buffer", 0, 1, Tickets(tickets=[ticket])))
        message = unpack(frames).message
        assert isinstance(message, Tickets) and message.tickets == [ticket]


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
