"""Sets of evaluation episodes in a whole serial run: their numbers are those of the journal."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serial_recipe import RECIPE
from serial_runs import Finished, trainer

from actors.evaluate import evaluate
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records
from evolver_async.config.sections.run import FINAL_SET
from evolver_async.runs.results.loaded_run import load_run

pytestmark = pytest.mark.process

MISLEADING = "{low_arm: dragon, high_arm: phoenix}"
SETS = (
    "eval.sets.swapped={tasks: 12, env: {params: " + MISLEADING + "}}",
    "eval.sets.sampled={tasks: 6, k: 3, first: 100, temperature: 1.0, every: 20}",
    "buffer.archive=all",
)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("sets"), RECIPE)


@pytest.fixture(scope="module")
def run(train: Callable[..., Finished]) -> Finished:
    return train("sets", *SETS)


def played(run_dir: Path) -> dict[tuple[int, str], list[tuple[records.Granted, records.Arrived]]]:
    """The episodes of the journal by version and set."""
    found: dict[tuple[int, str], list[tuple[records.Granted, records.Arrived]]] = {}
    granted: dict[int, records.Granted] = {}
    for record, _ in JournalReader(run_dir / "journal").read():
        if isinstance(record, records.Granted) and record.pinned is not None:
            granted[record.group_id] = record
        elif isinstance(record, records.Arrived) and record.group_id in granted:
            grant = granted[record.group_id]
            assert grant.pinned is not None
            name = "" if grant.episode is None else grant.episode.set_name
            found.setdefault((grant.pinned.step, name), []).append((grant, record))
    return found


def evaluations(run: Finished) -> list[dict[str, Any]]:
    return [row for row in run.rows if "eval/success" in row]


def test_the_numbers_of_a_set_are_those_of_its_episodes(run: Finished) -> None:
    episodes = played(run.run_dir)
    rows = evaluations(run)
    assert len(rows) == 4  # after each stage, and twice in between
    for row in rows:
        version = int(row["eval/version"])
        for name, k in (("swapped", 1), ("sampled", 3), (FINAL_SET, 1)):
            if f"eval/{name}/episodes" not in row:
                assert (version, name) not in episodes
                continue
            found = episodes[version, name]
            assert row[f"eval/{name}/episodes"] == len(found)
            arrived = [one for _, one in found]
            by_task: dict[str, list[records.Arrived]] = {}
            for grant, one in found:
                by_task.setdefault(grant.task.task_id, []).append(one)
            assert all(len(samples) == k for samples in by_task.values())
            expected = {
                f"avg@{k}": statistics.fmean(one.success for one in arrived),
                f"best@{k}": statistics.fmean(
                    any(one.success for one in samples) for samples in by_task.values()
                ),
                "reward_mean": statistics.fmean(one.reward for one in arrived),
                f"reward_best@{k}": statistics.fmean(
                    max(one.reward for one in samples) for samples in by_task.values()
                ),
                "distinct": len({one.content for one in arrived}),
                "turns_mean": statistics.fmean(one.turns for one in arrived),
            }
            for metric, value in expected.items():
                assert row[f"eval/{name}/{metric}"] == pytest.approx(value), (version, metric)


def test_the_policy_follows_the_names_that_mislead(run: Finished) -> None:
    last = evaluations(run)[-1]
    assert last["eval/success"] >= 0.9 and last["eval/swapped/avg@1"] <= 0.1
    assert last["eval/distinct"] == 2, "the bandit has two orders of its arms"
    assert last["eval/sampled/best@3"] >= last["eval/sampled/avg@3"]


def test_a_set_has_the_same_tasks_each_time_and_its_own_interval(run: Finished) -> None:
    episodes = played(run.run_dir)
    names = "", "sampled", FINAL_SET
    versions = {name: sorted(v for v, one in episodes if one == name) for name in names}
    assert versions == {"": [1, 10, 20, 21], "sampled": [1, 20, 21], FINAL_SET: [21]}
    for name in ("swapped", "sampled"):
        found = [
            [grant.task.map_seed for grant, _ in several]
            for (_, one), several in episodes.items()
            if one == name
        ]
        (seeds,) = {tuple(sorted(seeds)) for seeds in found}
        assert set(seeds) == set(range(100, 106) if name == "sampled" else range(12))
    for (_, name), found in episodes.items():
        split = "test" if name == FINAL_SET else "validation"
        assert {grant.task.split for grant, _ in found} == {split}
        swapped = {"low_arm": "dragon", "high_arm": "phoenix"} if name == "swapped" else {}
        assert all(g.task.params == {"high_probability": 0.5} | swapped for g, _ in found)


def test_further_sets_do_not_decide_which_checkpoint_is_best(run: Finished) -> None:
    notes = [one.success for one in load_run(run.run_dir).checkpoints if one.success is not None]
    assert notes[-1] == evaluations(run)[-1]["eval/success"]


def test_equal_seeds_give_equal_numbers_of_all_sets(
    run: Finished, train: Callable[..., Finished]
) -> None:
    assert train("again", *SETS).numbers() == run.numbers()


def test_a_checkpoint_is_evaluated_on_the_sets_too(run: Finished) -> None:
    deciding, swapped, sampled = evaluate(run.run_dir, 8).splitlines()
    assert "over 8 validation episodes, 2 distinct" in deciding
    value = evaluations(run)[-1]["eval/swapped/avg@1"]
    assert swapped.startswith(f"swapped: avg@1 {value:.3f}, best@1 {value:.3f}")
    assert sampled.startswith("sampled: avg@3 ") and "over 6 tasks, 2 distinct" in sampled
