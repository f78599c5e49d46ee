"""Everything that docs/metrics.md names is in the records of an offline W&B run."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launches import DEADLINE_S, wait_for
from wandb_records import definitions, files, history, records, run_record, step_rows, summary_of

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump
from evolver_async.config.sections import MetricsConfig
from evolver_async.durations import since_1970, utc
from evolver_async.metrics import families, gauges, wandb_process
from evolver_async.metrics.alerts import alert, last_title
from evolver_async.metrics.histograms import linear
from evolver_async.metrics.launches import record
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import read_state, send_rest
from evolver_async.metrics.wandb_rows import COLUMNS
from evolver_async.metrics.writer import Metrics

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
HISTOGRAMS = ("weights", "ratios", "lags", "rewards", "lengths")
PLACES = {  # an example of every placeholder
    "<env>": "grid",
    "<bucket>": "3-4",
    "<reason>": "timeout",
    "<call>": "step",
    "<kind>": "timeout",
    "<section>": "judge",
    "<name>": "learner",
    "<term>": "exact",
}


def documented() -> list[str]:
    """Names of all metrics of the document's first table, with examples for placeholders."""
    text = DOCUMENT.read_text(encoding="utf-8").split("## Weights & Biases")[0]
    found = []
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        family = ""
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            family = name.rpartition("/")[0] or family
            full = name if "/" in name or not family else f"{family}/{name}"
            for place, example in PLACES.items():
                full = full.replace(place, example)
            found.append(full.replace("*", "w_mean"))
    return found


def table(title: str) -> dict[str, list[str]]:
    """The rows of the document's table with this title, by their first cell."""
    lines = DOCUMENT.read_text(encoding="utf-8").partition(f"| {title} |")[2].splitlines()[2:]
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, second = line.strip("| ").split(" | ")
        rows[first.strip("`")] = re.findall(r"`([^`]+)`", second)
    return rows


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    keys = MetricsConfig(
        entity="team", group="sweep", job_type="cell", tags=["one", "two"], notes="of a test"
    )
    dump(Config(stages=[StageConfig(steps=5)], metrics=keys), path / "config.yaml")
    record(path, "recipe.yaml", ["train", "recipe.yaml", "a.api_key=hidden"], {"torch": "8"})
    record(path, None, ["train", "--resume", "run"], {"torch": "9"})
    monkeypatch.setattr(wandb_process, "CLOSE_S", DEADLINE_S)
    monkeypatch.setattr(wandb_process, "REST_S", DEADLINE_S)
    return path


@pytest.fixture
def metrics(run_dir: Path) -> Iterator[Metrics]:
    opened = Metrics(run_dir, wandb="offline")
    yield opened
    if not opened.rows.file.closed:
        opened.close()


def log(metrics: Metrics, step: int, **values: float) -> None:
    metrics.log(step, {"lineage": 1, "stage_kind": "rl", "time_s": 1.0, **values})


def sample(step: int) -> dict:
    """A line of samples/ with two turns."""
    return {
        "trajectory": f"{step}/0/0",
        "task": "t",
        "actor": "actor-0",
        "reward": 1.0,
        "success": True,
        "terms": {"exact": 1.0},
        "turn_rewards": [0.0, 1.0],
        "labels": [-1, 1],
        "text": [["PROMPT", "p"], ["ACTION", "a"], ["OBSERVATION", "o"], ["ACTION", "b"]],
        "text_turns": [0, 0, 1, 1],
        "turn_versions": [["1.3"], ["1.3", "1.4"]],
    }


def fill(metrics: Metrics, run_dir: Path) -> set[str]:
    """Write two steps that have everything; return the names of all metrics."""
    names = documented()
    beside = {"trajectories", "clock_s", *(n for n in names if n.startswith("histogram/"))}
    beside |= {name for name in names if name.startswith(("process/", "host/"))}
    texts = {"step", "lineage", "stage_kind"}
    (run_dir / "samples").mkdir()
    for step in (1, 2):
        path = run_dir / "samples" / f"step_{step:06d}.jsonl"
        path.write_text(json.dumps(sample(step)) + "\n")
        found = {name: linear(np.array([1.0, 2.0, 2.0])) for name in HISTOGRAMS}
        metrics.lineage = 1
        metrics.log_histograms(step, {name: one for name, one in found.items() if one is not None})
        log(metrics, step, **{name: 1.0 / step for name in names if name not in beside | texts})
    sampled = gauges.ProcessGauges().sample()
    gauges.append(run_dir, "learner", "learner", sampled)
    return {*names}


def test_the_document_lists_the_axes_and_the_best_values() -> None:
    listed = table("axis")
    buckets = {f"lag_{bucket}" for bucket in ("0", "1", "2", "3-4", "5-8", "9+")}
    for axis, names in listed.items():
        expanded = {*names} | (buckets if "lag_<bucket>" in names else set())
        assert expanded - {"lag_<bucket>"} == {*families.FAMILIES[axis]}
    assert listed.keys() == families.FAMILIES.keys()
    best = {name: kind for kind, names in table("summary").items() for name in names}
    for name, kind in best.items():
        assert families.summary_of(name.replace("<name>", "learner")) == f"{kind},last"
    assert families.BEST.keys() <= best.keys()


def test_every_documented_metric_belongs_to_a_family() -> None:
    names = [name for name in documented() if "/" in name and name not in families.AXES]
    assert len(names) > 100
    assert [n for n in names if n.partition("/")[0] not in families.AXIS_OF] == []
    assert {f"histogram/{name}" for name in HISTOGRAMS} <= {*names}


@pytest.mark.process
def test_every_documented_family_is_in_the_records(metrics: Metrics, run_dir: Path) -> None:
    names = fill(metrics, run_dir)
    metrics.close()
    (file,) = files(run_dir)
    logged = {key for row in history(file) for key in row}
    whole = {name for key in logged for name in (key, key.rpartition(".")[0])}
    assert names - whole == set()
    axes = definitions(file)
    for name in names - {*families.AXES}:
        if "/" in name or name == "trajectories":
            assert axes[name] == families.axis_of(name), name
    assert {families.axis_of(name) for name in names} >= {*families.AXES} - {None}


@pytest.mark.process
def test_histograms_tables_summary_and_config_can_be_read_back(
    metrics: Metrics, run_dir: Path
) -> None:
    fill(metrics, run_dir)
    metrics.close()
    (file,) = files(run_dir)
    rows = step_rows(file)
    assert [row["histogram/weights._type"] for row in rows] == ["histogram"] * 2
    assert sum(rows[0]["histogram/weights.values"]) == 3
    assert rows[0]["trajectories._type"] == "table-file"
    stored = json.loads((file.parent / "files" / rows[1]["trajectories.path"]).read_text())
    assert stored["columns"] == list(COLUMNS)
    assert stored["data"] == [
        [2, "2/0/0", "t", "actor-0", 1.0, True, "exact 1", 0, 0.0, "BAD", "1.3", "p", "", "", "a"],
        [
            *(2, "2/0/0", "t", "actor-0", 1.0, True, "exact 1", 1, 1.0, "GOOD"),
            *("1.3, 1.4", "", "", "o", "b"),
        ],
    ]
    assert summary_of(file)["eval/success"] == {"max": 1, "last": 0.5}
    assert summary_of(file)["offpolicy/ess"] == {"min": 0.5, "last": 0.5}
    run = run_record(file)
    assert (run.entity, run.run_group, run.job_type) == ("team", "sweep", "cell")
    assert (list(run.tags), run.notes) == (["one", "two"], "of a test")
    config = {one.key: json.loads(one.value_json) for one in run.config.update}
    assert config["recipe"] == "recipe.yaml" and config["versions"] == {"torch": "9"}
    assert config["command"] == [
        "evolver-async train recipe.yaml 'a.api_key=***'",
        "evolver-async train --resume run",
    ]
    assert config["learner"]["lr"] == Config().learner.lr
    assert not {"recipe", "command", "versions"} & {*vars(Config())}


@pytest.mark.process
def test_a_killed_upload_loses_no_row_and_goes_on_under_its_id(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/nowhere")  # a learner that uses W&B itself
    metrics = Metrics(run_dir, wandb="offline")
    upload = metrics.upload
    assert upload is not None and upload.process is not None
    upload.pause_s = 0.0
    log(metrics, 1)
    wait_for(lambda: upload.sent() == 1, "the first row")
    upload.process.send_signal(signal.SIGKILL)
    upload.process.wait()
    monkeypatch.setattr(wandb_process, "PAUSE_S", 0.0)
    for step in (2, 3, 4):
        log(metrics, step)
    assert upload.restarts == 1
    wait_for(lambda: upload.sent() == 4, "all rows")  # closing waits only so long
    metrics.close()
    assert [row["step"] for row in step_rows(files(run_dir)[-1])] == [1, 2, 3, 4]
    ids = {file.stem for file in files(run_dir)}
    assert ids == {f"run-{read_state(run_dir)['id']}"}


WRITER = """
import sys
from pathlib import Path
from evolver_async.metrics.writer import Metrics
metrics = Metrics(Path(sys.argv[1]), wandb="offline")
for step in range(1, 10**9):
    metrics.log(step, {"lineage": 1, "stage_kind": "rl", "time_s": 1.0})
    print(step, flush=True)
"""


@pytest.mark.process
def test_a_killed_learner_loses_at_most_the_row_that_it_was_writing(run_dir: Path) -> None:
    learner = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert learner.stdout is not None
    written = [int(next(learner.stdout)) for _ in range(50)]
    learner.kill()
    written += map(int, filter(str.strip, learner.stdout.read().splitlines()))
    learner.wait()
    learner.stdout.close()
    metrics = Metrics(run_dir, wandb="offline")  # the next incarnation
    metrics.close()
    steps = [row["step"] for row in step_rows(files(run_dir)[-1])]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) in (written[-1], written[-1] + 1), "a row is complete before its report"


@pytest.mark.process
def test_alerts_after_the_end_of_the_learner_are_sent(metrics: Metrics, run_dir: Path) -> None:
    metrics.alert("run finished", "all of it", "INFO")
    log(metrics, 1)
    metrics.close()
    before = files(run_dir)
    assert send_rest(run_dir, "offline") and files(run_dir) == before, "nothing was left"
    alert(run_dir, "x" * 100, "no processor is left", "ERROR")
    assert last_title(run_dir) == "x" * 63, "W&B refuses a longer one"
    assert send_rest(run_dir, "offline")
    found = [r.alert for r in records(files(run_dir)[-1]) if r.HasField("alert")]
    assert [(a.level, a.title[:3]) for a in found] == [("INFO", "run"), ("ERROR", "xxx")]
    assert [row["step"] for row in step_rows(files(run_dir)[-1])] == [1]


def test_gauges_of_one_period_form_one_row(tmp_path: Path) -> None:
    gauges.append(tmp_path, "buffer", "h", {"rss_bytes": 2.0, "nonsense": 1.0})
    gauges.append(tmp_path, "learner", "h", {"rss_bytes": 3.0, "host_cpu_share": float("nan")})
    lines = Tail(tmp_path / gauges.SYSTEM).rows()
    assert [line.keys() - {"time"} for line in lines] == [{"process", "host", "rss_bytes"}] * 2
    later = {**lines[0], "time": lines[0]["time"] + gauges.PERIOD_S, "rss_bytes": 4.0}
    rows = gauges.GaugeRows()
    (row,) = rows.take_in([*lines, later])
    assert row.pop("clock_s") >= 0 and since_1970(row.pop("time")) > 0
    assert row == {"process/buffer/rss_bytes": 2.0, "process/learner/rss_bytes": 3.0}
    (rest,) = rows.rest()
    assert rest.pop("time") == utc(later["time"])
    assert rest == {"clock_s": gauges.PERIOD_S, "process/buffer/rss_bytes": 4.0}
    assert rows.rest() == []


def test_a_process_measures_itself_and_its_host() -> None:
    found = gauges.ProcessGauges().sample()
    assert found.keys() == gauges.NAMES
    assert found["rss_bytes"] > 1e6 and 0 <= found["host_memory_share"] <= 1
