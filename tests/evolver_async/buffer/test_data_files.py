"""Rows of `data`: what a row means, and where one stands that has no meaning."""

import json
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.checks.config import check
from evolver_async.buffer.stages import eval_sets_of, numbers_of, source_of
from evolver_async.buffer.tasks import data_files
from evolver_async.buffer.tasks.data_files import DataTasks, check_examples, data_rows, data_tasks
from evolver_async.buffer.tasks.examples import RowCall, RowMessage, examples_of
from evolver_async.buffer.tasks.rows import ROW_BYTES, GivenTasks
from evolver_async.buffer.tasks.stream import TaskStream
from evolver_async.config import ConfigError, DataConfig
from evolver_async.config.load import load, stage_config
from evolver_async.launch import creation
from evolver_async.schema import Task

ASKED = {"role": "user", "content": "a?"}
SAID = {"role": "assistant", "content": "b"}
CHAT = {"messages": [ASKED, SAID]}


def tasks_of(path: Path, **keys: Any) -> DataTasks | GivenTasks:
    return data_tasks(DataConfig(path=str(path), **keys), "frozen_lake", {})


def learnt(row: dict[str, Any], kind: str = "sft", **columns: str) -> list[list[tuple[str, bool]]]:
    """The texts of what a row holds, each with whether it is learnt."""
    found = examples_of(row, kind, columns)
    return [[(one.content, one.learnt) for one in example.messages] for example in found]


WHOLE = [[("a?", False), ("b", True)]]


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a?", "completion": "b"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": "a?", "response": "b", "chosen": None},
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
    ],
)
def test_one_conversation_has_many_forms(row: dict[str, Any]) -> None:
    assert learnt(row) == WHOLE


def test_columns_can_have_other_names() -> None:
    assert learnt({"q": "a?", "s": "b", "prompt": 1}, prompt="q", completion="s") == WHOLE


def test_a_message_of_weight_0_and_those_of_a_prompt_are_not_learnt() -> None:
    other = {"role": "assistant", "content": "no", "weight": 0}
    assert learnt({"messages": [ASKED, other, ASKED, SAID]}) == [
        [("a?", False), ("no", False), ("a?", False), ("b", True)]
    ]
    assert learnt({"prompt": [ASKED, SAID, ASKED], "completion": "b"}) == [
        [("a?", False), ("b", False), ("a?", False), ("b", True)]
    ]


def test_preferences_are_two_endings_of_one_conversation() -> None:
    both = [[("a?", False), ("b", True)], [("a?", False), ("c", True)]]
    worse = {"role": "assistant", "content": "c"}
    assert learnt({"prompt": "a?", "chosen": "b", "rejected": "c"}, "dpo") == both
    assert learnt({"chosen": [ASKED, SAID], "rejected": [ASKED, worse]}, "dpo") == both
    rewards = [
        one.reward
        for one in examples_of({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", {})
    ]
    assert rewards == [1, 0]


def test_calls_thoughts_and_tools_are_read_in_both_spellings() -> None:
    called = {"role": "assistant", "content": None, "reasoning_content": "hm "}
    for arguments in ({"x": 1}, '{"x": 1}'):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        row = {"messages": [ASKED, called | {"tool_calls": [call]}]}
        for tools in ([{"name": "f"}], '[{"type": "function", "function": {"name": "f"}}]'):
            (example,) = examples_of(row | {"tools": tools}, "sft", {})
            assert example.messages[1] == RowMessage(
                "assistant", "", "hm", (RowCall("f", {"x": 1}),), True
            )
            assert example.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("row", "kind", "named"),
    [
        ({"messages": [ASKED]}, "sft", "assistant"),
        ({"messages": "a"}, "sft", "messages"),
        ({"messages": [{"role": "judge", "content": ""}]}, "sft", "message 0"),
        ({"messages": [ASKED, {"role": "assistant", "content": 1}]}, "sft", "message 1"),
        ({"prompt": "a"}, "sft", "completion"),
        ({"completion": "a"}, "sft", "prompt"),
        ({"prompt": " ", "completion": "b"}, "sft", "prompt"),
        ({"prompt": "a", "chosen": "b"}, "dpo", "rejected"),
        ({"chosen": "b", "rejected": "c"}, "dpo", "alike"),
        ({"text": ""}, "text", "text"),
        ({**CHAT, "tools": "["}, "sft", "tools"),
        ({**CHAT, "tools": [{"n": 1}]}, "sft", "tools"),
    ],
)
def test_what_a_row_lacks_is_named(row: dict[str, Any], kind: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        examples_of(row, kind, {})


def test_lines_are_cut_where_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "LOOKED_AT", 1)
    texts = [json.dumps(CHAT | {"n": n}) for n in range(5)]
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_bytes(f"\n{texts[0]}\r\n\n \n{texts[1]}\n".encode())
    two.write_text(f"{texts[2]}\nno json\n[1]\n{texts[3]}\n\n{texts[4]}")  # no end of line
    tasks = tasks_of(tmp_path)
    found = [tasks.task("train", number) for number in range(tasks.count("train"))]
    assert [task.row.get("n") for task in found] == [0, 1, 2, None, None, 3, 4]
    places = [("a", 2), ("a", 5), ("b", 1), ("b", 2), ("b", 3), ("b", 4), ("b", 6)]
    assert [task.task_id for task in found] == [
        f"{tmp_path}/{name}.jsonl, line {line}" for name, line in places
    ]
    assert [bool(task.query) for task in found] == [task.row == {} for task in found]
    with pytest.raises(ConfigError, match=r"data\.path.*b\.jsonl, line 2"):
        assert isinstance(tasks, DataTasks)
        check_examples(tasks, "sft")


@pytest.mark.parametrize(
    "content", ["", "\n \n", "[1]\n", "x" * (ROW_BYTES + 10), "\ufeff{}"], ids=lambda one: one[:4]
)
def test_a_file_without_rows_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"data\.path: .*bad\.jsonl"):
        tasks_of(path)


def test_a_table_has_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = [CHAT, {"messages": [ASKED, {"role": "assistant", "content": "c"}]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    tasks = tasks_of(path)
    assert isinstance(tasks, DataTasks)
    found = [tasks.task("train", number) for number in range(2)]
    assert [learnt(task.row)[0][1][0] for task in found] == ["b", "c"]
    assert found[1].task_id == f"{path}, row 2"


def test_rows_of_other_splits_do_not_train(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("train-0", "test", "validation-1"):
            row = CHAT | {"n": name}
            if kind == "jsonl":
                (folder / f"{name}.jsonl").write_text(json.dumps(row))
            else:
                pq.write_table(pa.Table.from_pylist([row]), folder / f"{name}.parquet")
        tasks = tasks_of(folder)
        assert [tasks.task("train", n).row["n"] for n in range(tasks.count("train"))] == ["train-0"]
        held = [tasks.task("validation", n) for n in range(tasks.count("validation"))]
        assert [(one.row["n"], one.split) for one in held] == [("validation-1", "validation")]
        assert tasks_of(folder / f"test.{kind}").count("train") == 1, "it was asked for"
        (folder / f"train-0.{kind}").unlink()
        with pytest.raises(ConfigError, match=r"^data\.path: "):
            tasks_of(folder)
    splits = {name: datasets.Dataset.from_list([CHAT | {"n": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    tasks = tasks_of(tmp_path / "set")
    assert tasks.count("train") == 1 and tasks.task("train", 0).row["n"] == "train"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_a_file_of_their_own_are_held_out_and_a_run_keeps_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "_prepare", lambda config, run_dir: None)
    path, other = tmp_path / "d.jsonl", tmp_path / f"zero.{kind}"
    rows = [CHAT | {"n": n} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows[:3])))
    if kind == "jsonl":
        other.write_text("\n" + "\n".join(map(json.dumps, rows[3:])))
    else:
        pq.write_table(pa.Table.from_pylist(rows[3:]), other)
    arguments = [f"run.dir={tmp_path}", f"run.name={kind}", f"data={{path: {path}}}"]
    stages = f"stages=[{{kind: sft, epochs: 1, data: {{validation: {other}}}}}]"
    config, run_dir = creation.create(load(None, [*arguments, stages]), None)
    path.unlink()
    other.unlink()
    assert config.stages[0].steps == 1
    tasks = source_of(stage_config(load(run_dir / "config.yaml"), 0)).data
    assert isinstance(tasks, DataTasks)
    for split, numbers in (("train", [0, 1, 2]), ("validation", [3, 4])):
        found = [tasks.task(split, number) for number in range(tasks.count(split))]
        assert [task.row["n"] for task in found] == numbers
    assert found[0].task_id == f"{other}, {'line 2' if kind == 'jsonl' else 'row 1'}"
    with pytest.raises(ConfigError, match=r"^data\.validation: "):
        tasks_of(tasks.rows.directory, validation=str(other))


def test_held_out_rows_are_looked_at_like_others_and_are_conversations(tmp_path: Path) -> None:
    path, other = tmp_path / "d.jsonl", tmp_path / "v.jsonl"
    path.write_text(json.dumps(CHAT))
    other.write_text('{"prompt": "a"}')
    tasks = tasks_of(path, validation=str(other))
    assert isinstance(tasks, DataTasks)
    with pytest.raises(ConfigError, match=r"v\.jsonl, line 1"):
        check_examples(tasks, "sft")
    path.write_text(json.dumps({"seed": 1, "reference": ["up"]}))
    other.write_text(json.dumps({"seed": 2, "reference": ["up"]}))
    with pytest.raises(ConfigError, match=r"^data\.validation: "):
        tasks_of(path, validation=str(other))
    with pytest.raises(ConfigError, match=r"^data\.validation: .*nowhere"):
        tasks_of(path, validation=str(tmp_path / "nowhere"))


def test_what_the_wire_does_not_carry_is_left_out_by_name(tmp_path: Path) -> None:
    path, deep = tmp_path / "d.jsonl", "[" * 40 + "]" * 40
    rows = [json.dumps(CHAT), json.dumps(CHAT | {"n": 1 << 70}), f'{{"messages": [], "n": {deep}}}']
    path.write_text("\n".join(rows))
    tasks = tasks_of(path)
    found = [tasks.task("train", number) for number in range(3)]
    assert [bool(task.query) for task in found] == [False, True, True]
    for task in found:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task


def test_evaluations_of_a_training_split_know_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(CHAT))
    stages = f"stages=[{{kind: sft, epochs: 1, data: {{path: {path}}}}}]"
    staged = stage_config(load(None, [stages, "eval.sets={seen: {split: train, tasks: 2}}"]), 0)
    assert [task.origin for task in eval_sets_of(staged)["seen"].examples()] == ["original"]


def test_rows_of_an_environment_are_its_tasks(tmp_path: Path) -> None:
    path = tmp_path / "experts.jsonl"
    rows = [{"seed": n, "reference": ["up", "left"]} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    tasks = tasks_of(path)
    found = [tasks.task("train", number) for number in range(tasks.count("train"))]
    assert [task.map_seed for task in found] == [*range(9)]
    assert {task.env for task in found} == {"frozen_lake"}
    assert found[0].reference == ["up", "left"]


def test_a_stage_of_rows_trains_on_them_and_is_evaluated_on_the_run_s_tasks(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(CHAT | {"n": n}) for n in range(7)))
    stages = f"stages=[{{kind: sft, epochs: 2, data: {{path: {path}}}}}, {{kind: rl, steps: 1}}]"
    config = load(None, [stages, "learner.groups_per_step=300"])
    first, second = (source_of(stage_config(config, index)) for index in range(2))
    assert first.train == 7 and second.data is None
    assert first.task("validation", 3) == second.task("validation", 3)
    numbers = numbers_of(stage_config(config, 0), "sft")
    assert (numbers.kind, numbers.group_size) == ("demo", 1) and numbers.demo_groups >= 600
    tasks, met = TaskStream(0, first), []
    for _ in range(14):
        queued = tasks.peek()
        assert queued is not None
        tasks.take(queued.task)
        met.append(queued.task.row["n"])
    assert sorted(met[:7]) == sorted(met[7:]) == [*range(7)] and met[:7] != met[7:]


def test_a_run_keeps_its_rows_and_counts_its_epochs_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "_prepare", lambda config, run_dir: None)
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(CHAT) for _ in range(7)))
    arguments = [f"run.dir={tmp_path}", "run.name=r", "learner.groups_per_step=4"]
    stages = f"stages=[{{kind: sft, epochs: 2, data: {{path: {path}}}}}]"
    config, run_dir = creation.create(load(None, [*arguments, stages]), None)
    path.unlink()
    assert (config.stages[0].steps, config.stages[0].epochs) == (4, 0)
    staged = stage_config(load(run_dir / "config.yaml"), 0)
    assert data_rows(staged.data).directory.parent == run_dir
    assert source_of(staged).task("train", 6).task_id == f"{path}, line 7"


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("world_model", CHAT),
        ("reflect", CHAT),
        ("dpo", {"seed": 1, "reference": ["up"]}),
        ("kto", {"seed": 1, "reference": ["up"]}),
    ],
)
def test_rows_of_a_form_that_a_stage_cannot_learn_are_refused(
    tmp_path: Path, kind: str, row: dict[str, Any]
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(row))
    config = load(None, [f"stages=[{{kind: {kind}, steps: 1, data: {{path: {path}}}}}]"])
    with pytest.raises(ConfigError, match=rf"^data\.path: stages\[0\]\.kind: {kind} "):
        check(config)
