"""A report holds what the journal holds, and nothing in it can become HTML or a script."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reported_runs import HOSTILE, SEGMENT_BYTES, MadeRun

from evolver_async.cli import main
from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.config.load import dump
from evolver_async.metrics.replies import SavedReply
from evolver_async.metrics.replies import save as save_replies
from evolver_async.metrics.tail import Tail
from evolver_async.runs.report import browser, write
from evolver_async.runs.report.browser import unpack
from evolver_async.runs.report.sections import sections
from evolver_async.runs.results import reading_progress
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.schema import Role
from evolver_async.wire.messages import Kept


class Reading(HTMLParser):
    """Elements of a page, and the texts of its scripts by id; scripts without an id are run."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}
        self.scripts: list[str] = []
        self.text = ""
        self._within: dict[str, str | None] | None = None
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._within = dict(attrs)

    def handle_endtag(self, tag: str) -> None:
        self._within = None if tag == "script" else self._within

    def handle_data(self, data: str) -> None:
        if self._within is None:
            self.text += data
        elif name := self._within.get("id"):
            self.data[name] = self.data.get(name, "") + data
        else:
            self.scripts.append(data)

    @property
    def policy(self) -> str:
        (policy,) = [
            attributes["content"]
            for tag, attributes in self.elements
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policy is not None
        return policy


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def bodies(reading: Reading) -> list[dict[str, Any]]:
    """The bodies of a page's trajectories, in the order of its index."""
    parts = {name: unpack(text) for name, text in reading.data.items() if name.startswith("part-")}
    columns = unpack(reading.data["index"])["columns"]
    places = zip(columns["part"], columns["slot"], strict=True)
    return [parts[f"part-{part}"][slot] for part, slot in places if parts]


def test_the_page_holds_the_trajectories_of_the_journal(run: MadeRun, tmp_path: Path) -> None:
    run.step("left", "right")
    run.step("up", filtered="variance")
    run.close()
    page = tmp_path / "page.html"
    write.write(load_run(run.run_dir), page)
    reading = Reading(page)
    index, results = unpack(reading.data["index"]), load_run(run.run_dir)
    columns, texts = index["columns"], index["texts"]
    assert columns["said"][0] == "left right" and columns["said"][-1] == "up"
    facts = zip(
        columns["group"], columns["member"], columns["reward"], columns["steps"], strict=True
    )
    assert list(facts) == [
        (one.group, one.member, one.reward, [one.step] if one.step else [])
        for one in results.trajectories
    ]
    fates = [texts["fate"][place] for place in columns["fate"]]
    assert fates == ["trained"] * 6 + ["filtered: variance"] * 2
    for body, one in zip(bodies(reading), results.trajectories, strict=True):
        (sequence,) = one.load().sequences
        shown = "".join(index["pieces"][place] for place in body["s"][0]["t"])
        assert shown == "".join(text for _, text in results.text([sequence]))
        roles = [role for role, _, count in body["s"][0]["r"] for _ in range(count)]
        assert roles == sequence.roles.tolist()
        assert len(body["s"][0]["p"]) == roles.count(Role.ACTION)
        assert body["labels"] == one.load().labels.tolist()
        assert body["rewards"] == one.load().turn_rewards.tolist()
        assert body["guided"] == (one.member == 0)
    assert columns["guided"] == [1, 0] * 4


def test_the_head_tells_the_algorithms_and_environments_of_stages_that_differ(
    run: MadeRun, tmp_path: Path
) -> None:
    run.step("left", "right")
    run.close()
    own = {"env": {"name": "bandit"}, "advantage": {"kind": "reinforce"}}
    first = StageConfig(kind="sft", steps=1)
    for changed, algorithm, environment in (
        ([first, StageConfig(steps=1)], "grpo, none", "frozen_lake"),
        (
            [first, StageConfig(steps=1), StageConfig(steps=1, override=own)],
            "stage 1: grpo, none; stage 2: reinforce, none",
            "stage 0: frozen_lake; stage 1: frozen_lake; stage 2: bandit",
        ),
    ):
        config = Config(stages=changed, policy=run.config.policy)
        config.correction.kind = "none"
        config.advantage.kind = "grpo"
        dump(config, run.run_dir / "config.yaml")
        write.write(load_run(run.run_dir), tmp_path / "page.html")
        text = "".join(Reading(tmp_path / "page.html").text.split())
        facts = f"environment{environment}algorithm{algorithm}lineages"
        assert facts.replace(" ", "") in text


def test_the_page_shows_the_configuration_beside_the_curves(run: MadeRun, tmp_path: Path) -> None:
    run.step()
    run.close()
    found = sections(load_run(run.run_dir), [])[-1]
    changed, everything = found.tables
    rows = {row[0]: row[1:] for row in changed.rows}
    assert rows["policy.path"] == [str(run.run_dir / "policy"), ""]
    assert len(everything.rows) > len(changed.rows)
    assert "learner.lr" in {row[0] for row in everything.rows}


def test_the_page_shows_saved_evaluations(run: MadeRun, tmp_path: Path) -> None:
    run.step()
    run.close()
    facts = {"task": "t/1", "success": True, "reward": 1.0, "turns": 1}
    (run.run_dir / "evaluations").mkdir()
    saved = [SavedReply(evaluated="x, step 1", prompt="p", reply=HOSTILE, **facts)] * 300
    save_replies(run.run_dir / "evaluations" / "one.jsonl", saved)
    (table,) = next(
        one.tables for one in sections(load_run(run.run_dir), []) if "Replies" in one.title
    )
    assert len(table.rows) == 200 and table.rows[0] == ["", "t/1", 0, "yes", 1.0, "p", HOSTILE]
    write.write(load_run(run.run_dir), tmp_path / "page.html")
    assert HOSTILE in Reading(tmp_path / "page.html").text


def test_the_head_tells_the_seconds_of_training(run: MadeRun, tmp_path: Path) -> None:
    """A late evaluation has the time of its result, and a row of failures has none."""
    run.step("left", "right")
    evaluation = {"eval/success": 0.5, "eval/episodes": 8.0, "eval/distinct": 8.0}
    for late in ({"time_s": 99.0, **evaluation}, {"failures/agent": 1.0}):
        run.log(**late)
        write.write(load_run(run.run_dir), tmp_path / "page.html")
        assert "seconds1stages" in Reading(tmp_path / "page.html").text
    run.close()


def test_ratios_and_advantages_are_those_of_the_samples(run: MadeRun, tmp_path: Path) -> None:
    groups = run.step("left")
    run.close()
    first, second, *_ = load_run(run.run_dir).trajectories
    run.measure(first.load(), 1)
    found = browser.pages(load_run(run.run_dir))
    assert found.columns["measured"] == [1, 0, 0, 0] and first.group == groups[0]
    measured = unpack(found.parts[0])[0]["measured"]
    assert measured["ratios"] == [1.5] * first.tokens and measured["step"] == 1
    assert "measured" not in unpack(found.parts[0])[1] and second.member == 1
    write.write(load_run(run.run_dir), tmp_path / "page.html")
    assert "Ratio and advantage are known for 1 of them" in Reading(tmp_path / "page.html").text


def test_samples_are_read_for_the_trajectories_of_the_page_alone(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all steps of a long run are more than a memory holds."""
    run.step("left")
    run.close()
    first = load_run(run.run_dir).trajectories[0]
    for step in (1, 2, 3):
        run.measure(first.load(), step)
    read: list[Path] = []

    class CountedTail(Tail):
        def rows(self, most_bytes: int = -1) -> list[dict[str, Any]]:
            read.append(self.path)
            return super().rows(most_bytes)

    monkeypatch.setattr(browser, "Tail", CountedTail)
    (found,) = (unpack(part) for part in browser.pages(load_run(run.run_dir)).parts)
    assert found[0]["measured"]["step"] == 1
    assert [path.name for path in read] == ["step_000001.jsonl"]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "<b onclick=x>")
    run.step(HOSTILE, "<!--<script>")
    run.log(stage=0.0, stage_kind="rl", **{f"failures/{HOSTILE}": 1.0})
    (run.run_dir / "logs").mkdir()
    log = f"2026-11-23T09:11:15.162Z WARNING a.b: {HOSTILE} restart 1 of 3\n"
    (run.run_dir / "logs" / "launcher.log").write_text(log)
    run.close()
    page = tmp_path / "page.html"
    write.write(load_run(run.run_dir), page)
    reading = Reading(page)
    assert "<img" not in page.read_text(encoding="utf-8").split("<script>")[0]
    assert {tag for tag, _ in reading.elements} & {"img", "b", "iframe"} == set()
    assert [one for _, found in reading.elements for one in found if one.startswith("on")] == []
    assert HOSTILE in reading.text and "<b onclick=x>" in reading.text
    pieces, (body, *_) = unpack(reading.data["index"])["pieces"], bodies(reading)
    assert HOSTILE in "".join(pieces[place] for place in body["s"][0]["t"])
    json.loads(reading.data["figures"])


def test_the_policy_allows_the_two_scripts_of_the_page_alone(run: MadeRun, tmp_path: Path) -> None:
    run.step()
    run.close()
    page = tmp_path / "page.html"
    write.write(load_run(run.run_dir), page)
    reading = Reading(page)
    assert len(reading.scripts) == 2 and "http" not in re.sub(r"'.*?'", "", reading.policy)
    hashes = [hashlib.sha256(script.encode()).digest() for script in reading.scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes)
    assert f"default-src 'none'; script-src {allowed};" in reading.policy
    assert [found for tag, found in reading.elements if tag == "link" or "src" in found] == []


def test_without_out_the_report_is_in_the_run_directory(
    run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step()
    assert main(["report", str(run.run_dir)]) == 0
    run.close()
    page, counted = capsys.readouterr().out.splitlines()
    assert Path(page) == run.run_dir / "report.html" and Path(page).is_file()
    assert counted.startswith("4 of 4 trajectories, ")


def test_too_many_trajectories_become_a_folder(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "PAGE_TRAJECTORIES", 6)
    monkeypatch.setattr(browser, "PART", 2)
    for _ in range(3):
        run.step("left")
    run.close()
    written = write.write(load_run(run.run_dir))
    assert written.page == run.run_dir / "report" / "index.html" and written.shown == 12
    scripts = sorted((written.page.parent / "trajectories").iterdir())
    assert [path.name for path in scripts] == [f"{number}.js" for number in range(6)]
    found = re.fullmatch(r'receiveTrajectories\(0, "([\w+/=]+)"\);\n', scripts[0].read_text())
    assert found and len(unpack(found[1])) == 2
    reading = Reading(written.page)
    assert not bodies(reading) and "script-src 'sha256-" in reading.policy
    one = write.write(load_run(run.run_dir), tmp_path / "page.html")
    assert (one.shown, one.total) == (6, 12)
    assert "This page has 6 of the 12 trajectories" in Reading(one.page).text
    groups = unpack(Reading(one.page).data["index"])["columns"]["group"]
    assert sorted(set(groups)) == [0, 2, 4], "whole groups, spread over the run"


def test_a_page_of_long_trajectories_is_no_larger_than_one_of_many(run: MadeRun) -> None:
    """Its parts end before 200 trajectories, so that a limit is passed by little."""
    for _ in range(3):
        run.step(*["left " * 5000] * 4)
    run.close()
    results = load_run(run.run_dir)
    whole, limited = browser.pages(results), browser.pages(results, limit_bytes=1)
    assert whole.count == whole.total == 12 and len(whole.parts) > 1
    sizes = [one.size for one in results.trajectories]
    assert limited.count < 12 and sum(sizes[: limited.count - 2]) < browser.PART_BYTES


@pytest.mark.parametrize("foreign", ["index.html", "trajectories/mine.npy", "notes.txt"])
def test_a_folder_of_other_files_is_left_as_it_is(
    run: MadeRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    foreign: str,
) -> None:
    """It is refused before the trajectories are read, which takes minutes for a long run."""
    monkeypatch.setattr(write, "pages", None)
    run.step()
    run.close()
    path = tmp_path / "out" / foreign
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert main(["report", str(run.run_dir), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path}/out: is not empty and no earlier report" in capsys.readouterr().err
    assert [one for one in (tmp_path / "out").rglob("*") if one.is_file()] == [path]
    assert path.read_text() == "mine"


def test_a_folder_report_replaces_an_earlier_one_and_nothing_else(
    run: MadeRun, tmp_path: Path
) -> None:
    run.step()
    run.close()
    out = tmp_path / "out"
    write.write(load_run(run.run_dir), out)
    (out / "trajectories" / "9.js").touch()
    (out / "notes.txt").write_text("mine")
    write.write(load_run(run.run_dir), out)
    assert [path.name for path in (out / "trajectories").iterdir()] == ["0.js"]
    assert (out / "notes.txt").read_text() == "mine"
    (out / "trajectories" / "mine.npy").touch()
    with pytest.raises(ConfigError, match="choose another folder"):
        write.write(load_run(run.run_dir), out)
    assert (out / "trajectories" / "mine.npy").exists()


def test_a_report_that_takes_long_says_how_far_it_is(
    run: MadeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.step("left")
    run.close()
    assert main(["report", str(run.run_dir)]) == 0
    assert not capsys.readouterr().err, "it takes no second"
    monkeypatch.setattr(reading_progress, "PAUSE_S", 0.0)
    assert main(["report", str(run.run_dir)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "MB of metrics.jsonl read: 0 of 0",
        "journal segments read: 1 of 1",
        "trajectories packed: 4 of 4",
    ]


def test_a_run_that_has_not_kept_its_samples_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(tmp_path / "run", segment_bytes=SEGMENT_BYTES)
    for _ in range(12):
        run.step("left", "right", "up")
        run.world.ask("learner", Kept(take=run.takes))
    run.close()
    assert main(["report", str(run.run_dir)]) == 0
    assert "journal segments were removed (buffer.archive=none)" in capsys.readouterr().out
    for path in (run.run_dir / "journal").glob("*.log"):
        path.unlink()
    assert main(["report", str(run.run_dir)]) == 0
    assert "has no journal, so there are no trajectories" in capsys.readouterr().out
    text = Reading(run.run_dir / "report.html").text
    assert "The journal holds the tokens of no trajectory." in text


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "is not a run directory"),
        (
            lambda path: dump(Config(stages=[StageConfig(steps=5)]), path / "config.yaml"),
            "has no metrics yet: no learner step has ended",
        ),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(
    make: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert sentence in errors and errors.count("\n") == 1


def test_an_out_that_cannot_be_written_is_one_sentence(
    run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step()
    run.close()
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    for out, sentence in (
        ("file", "is a file, not a directory"),
        ("folder.html", "is a directory"),
        ("file/page.html", "File exists"),
    ):
        assert main(["report", str(run.run_dir), "--out", str(tmp_path / out)]) == 2
        assert sentence in capsys.readouterr().err


def test_a_damaged_journal_is_one_sentence(
    run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step()
    run.step()
    run.close()
    path = run.run_dir / "journal" / "00000001.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    assert main(["report", str(run.run_dir)]) == 2
    assert "00000001.log at" in capsys.readouterr().err
