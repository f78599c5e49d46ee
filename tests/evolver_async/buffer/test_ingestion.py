"""Logs of conversations with outcomes become rows that stages learn from."""

import json
from pathlib import Path
from typing import Any

import pytest

from evolver_async.buffer.tasks.examples import examples_of
from evolver_async.buffer.tasks.ingestion import ingest
from evolver_async.buffer.tasks.logged import trajectory_of
from evolver_async.buffer.tasks.rows import messages_of
from evolver_async.cli import main
from evolver_async.config import ConfigError


def said(question: str, answer: str, **others: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **others}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LOGS = [
    said("a?", "1", feedback="up", user="u1"),
    said("a?", "2", feedback="down", user="u2"),
    said("a?", "3", feedback="up"),
    {"messages": [{"role": "user", "content": "b?"}], "feedback": "down"},
    {"prompt": "c?", "completion": "4", "feedback": "👎"},
]


def test_each_file_holds_what_its_stage_learns(tmp_path: Path) -> None:
    logs, out = written(tmp_path / "logs.jsonl", LOGS), tmp_path / "out"
    found = ingest([logs], out, by="user")
    assert found.read == 5 and sum(found.left_out.values()) == 1
    assert list(found.last.values()) == [f"{logs}, line 4"]
    good, labels, pairs, tasks = (
        read(out / f"{name}.jsonl") for name in ("demonstrations", "labels", "preferences", "tasks")
    )
    assert [row["source"] for row in good] == [f"{logs}, line 1", f"{logs}, line 3"]
    assert [row.get("by") for row in good] == ["u1", None]
    for row in good:
        assert examples_of(row, "sft", {})
    assert [row["label"] for row in labels] == [True, False, True, False]
    assert [examples_of(row, "kto", {})[0].reward for row in labels] == [1, 0, 1, 0]
    (pair,) = pairs
    endings = [one.messages[-1].content for one in examples_of(pair, "dpo", {})]
    assert endings == ["1", "2"] and pair["rejected_from"]["by"] == "u2"
    assert [(row["outcome"], row["answers"]) for row in tasks] == [(2 / 3, 3), (0, 1)]
    assert [messages_of(row["prompt"])[-1]["content"] for row in tasks] == ["a?", "c?"]


def test_logs_that_know_their_tokens_become_trajectories_too(tmp_path: Path) -> None:
    content = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -1}]
    chat = {"prompt_token_ids": [1, 2], "choices": [{"logprobs": {"content": content}}]}
    known = {"logprobs": {"token_logprobs": [-0.5]}, "token_ids": [9], "prompt_token_ids": [3]}
    texts = [{"token": "a", "logprob": -0.5}]
    plain = {"prompt_token_ids": [1], "token_ids": [7], "logprobs": [-0.5]}
    rows = [
        said("a?", "1", feedback="up", response=chat, user="u1"),
        {"choices": [known], "reward": 0.25},
        {"ids": [5], "token_ids": [6], "logprobs": [-1], "reward": 2, "tokenizer": "t"},
        plain | {"prompt_token_ids": [1], "reward": 1, "logprobs": [0.5]},
        said("b?", "2", feedback="up", choices=[{"logprobs": {"content": texts}}]),
    ]
    logs, out = written(tmp_path / "logs.jsonl", rows), tmp_path / "out"
    found = ingest([logs], out, by="user", columns={"prompt_token_ids": "ids"})
    assert found.written["trajectories"] == 3 and found.written["demonstrations"] == 2
    assert [*found.last.values()] == [f"{logs}, line 4"]
    made = read(out / "trajectories.jsonl")
    tokens = ([1, 2], [7, 8], [-0.5, -1]), ([3], [9], [-0.5]), ([5], [6], [-1])
    for row, (prompt, sampled, logprobs) in zip(made, tokens, strict=True):
        (sequence,) = trajectory_of(row, {}).sequences
        assert sequence.tokens.tolist() == [*prompt, *sampled]
        assert sequence.logprobs.tolist() == [*[0] * len(prompt), *logprobs]
    assert [row["reward"] for row in made] == [1, 0.25, 2]
    assert made[0]["by"] == "u1" and made[2]["tokenizer"] == "t"
    assert made[2]["source"] == f"{logs}, line 3"
    ingest([written(tmp_path / "plain.jsonl", LOGS)], tmp_path / "none")
    assert not (tmp_path / "none" / "trajectories.jsonl").exists()


def test_a_file_that_is_missing_is_looked_for_nowhere_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        ingest([tmp_path / "missing.jsonl"], tmp_path / "out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", ["maybe", [1], None])
def test_an_outcome_without_meaning_is_refused_and_nothing_is_left(
    tmp_path: Path, value: Any
) -> None:
    logs = written(tmp_path / "logs.jsonl", [LOGS[0], said("a?", "1", feedback=value)])
    with pytest.raises(ConfigError, match=r"logs\.jsonl, line 2"):
        ingest([logs], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["logs.jsonl"]


def test_numbers_are_compared_with_a_threshold(tmp_path: Path, capsys: Any) -> None:
    rows = [said("a?", str(stars), stars=stars) for stars in range(1, 6)]
    logs, out = written(tmp_path / "logs.jsonl", rows), tmp_path / "out"
    arguments = ["ingest", str(out), str(logs), "--outcome", "stars", "--threshold", "4"]
    assert main(arguments) == 0
    assert len(read(out / "demonstrations.jsonl")) == 2
    assert "5 conversations" in capsys.readouterr().out
    assert main(arguments) == 2, "the directory exists"
