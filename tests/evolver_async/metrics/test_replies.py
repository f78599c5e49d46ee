"""Saved evaluations are read, compared by task, and refused where they are none."""

from pathlib import Path

import pytest

from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.metrics.replies import SavedReply, check_writable, load, save


def reply(task: str, success: bool, text: str = "said", **others) -> SavedReply:
    return SavedReply(
        evaluated="model",
        task=task,
        success=success,
        reward=float(success),
        turns=1,
        prompt="asked",
        reply=text,
        **others,
    )


def test_episodes_are_read_as_they_were_saved(tmp_path: Path) -> None:
    found = [reply("a", True, "ö\n\x1b[2J"), reply("a", False, set_name="s", sample=2)]
    found.append(reply("b", False, terms={"exact": 0.5}, metrics={"moves": 3.0}))
    save(tmp_path / "x.jsonl", found)
    assert load(tmp_path / "x.jsonl") == found
    assert '"set":"s"' in (tmp_path / "x.jsonl").read_text()


def test_two_files_are_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    save(first, [reply("t/1", False, "bad\x1b[2J"), reply("t/2", True), reply("t/3", False)])
    save(second, [reply("t/2", True), reply("t/1", True, "good"), reply("t/4", True)])
    assert main(["eval", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "A 0.500, B 1.000, B - A +0.500" in out and "over 2 episodes, 2 tasks" in out
    assert "1 episodes succeed in B alone, 0 in A alone" in out
    assert "1 of 2 episodes differ" in out and "2 episodes are in one of the files alone" in out
    lines = out.splitlines()
    at = lines.index("t/1")
    assert "bad" in lines[at + 1] and "good" in lines[at + 2] and "\x1b" not in out


def test_samples_of_a_task_count_as_one_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, success in (("a", False), ("b", True)):
        rows = [reply(f"t/{n % 2}", success, sample=n // 2, set_name="s") for n in range(8)]
        save(tmp_path / f"{name}.jsonl", rows)
    assert main(["eval", *(str(tmp_path / f"{name}.jsonl") for name in "ab")]) == 0
    assert "s: success A 0.000, B 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "named"),
    [("", "has no episode"), ("{}\n", "line 1"), ('{"a": \n', "line 1"), (None, "x.jsonl")],
)
def test_other_files_are_one_sentence(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        load(path)


def test_files_without_a_common_task_and_places_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a.jsonl", [reply("a", True)])
    save(tmp_path / "b.jsonl", [reply("b", True)])
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    assert main(["eval", *paths]) == 2
    assert "in common" in capsys.readouterr().err
    assert main(["eval", paths[0]]) == 2
    check_writable(tmp_path / "new" / "x.jsonl")
    for bad in (tmp_path, tmp_path / "a.jsonl" / "x.jsonl"):
        with pytest.raises(ConfigError, match="--save"):
            check_writable(bad)
