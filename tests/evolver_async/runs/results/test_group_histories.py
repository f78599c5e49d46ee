"""Histories of groups agree with what the buffer decided, across restarts of the learner."""

from pathlib import Path

import pytest
from reported_runs import SEGMENT_BYTES, MadeRun

from evolver_async.runs.results.loaded_run import RunResults, load_run
from evolver_async.wire.messages import Kept


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def loaded(run: MadeRun, **options: bool) -> RunResults:
    return load_run(run.run_dir, **options)


def fates(results: RunResults) -> dict[int, tuple[str, str]]:
    return {one.group: (one.fate, one.reason) for one in results.trajectories}


def test_every_trajectory_has_its_fate_and_the_step_that_trained_it(run: MadeRun) -> None:
    first = run.step()
    kept, dropped = run.step(filtered="variance")
    waiting = run.group(["left"])
    results = loaded(run)
    assert fates(results) == {
        **dict.fromkeys((*first, kept), ("trained", "")),
        dropped: ("filtered", "variance"),
        waiting: ("held", ""),
    }
    assert [one.step for one in results.trajectories] == [1, 1, 1, 1, 2, 2, None, None, None, None]
    assert {one.group for one in results.trained_at(2)} == {kept}
    run.close()


def test_lags_are_counted_from_the_head_of_the_take(run: MadeRun) -> None:
    run.group(["left"])
    run.group(["left"])
    run.group(["left"])
    old = run.group(["left"])
    run.train()
    run.train()
    (lag,) = {one.lag for one in loaded(run).trajectories if one.group == old}
    assert lag == 1
    run.close()


def test_groups_that_are_too_old_are_evicted(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", max_staleness=1, sampler="freshest")
    *_, old = [run.group(["left"]) for _ in range(3)]
    run.train()
    for _ in range(2):
        run.step()
    run.world.pass_time(1.0)
    assert fates(loaded(run))[old] == ("evicted", "stale")
    run.close()


def test_takes_of_an_abandoned_lineage_are_marked_and_their_repeats_count(run: MadeRun) -> None:
    run.step()
    groups = run.step()
    run.go_back(1)
    assert fates(loaded(run))[groups[0]] == ("held", ""), "it is to be trained again"
    assert run.train() == groups, "the take is repeated"
    results = loaded(run)
    uses = next(one.trainings for one in results.trajectories if one.group == groups[0])
    assert [(use.step, use.lineage, use.abandoned) for use in uses] == [(2, 1, True), (2, 2, False)]
    assert fates(results)[groups[0]] == ("trained", "")
    assert [row["lineage"] for row in results.steps] == [1, 2]
    assert [row["lineage"] for row in loaded(run, abandoned=True).steps] == [1, 1, 2]
    run.close()


def test_a_history_that_begins_with_a_snapshot_knows_the_groups_that_were_held(
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path / "run", segment_bytes=SEGMENT_BYTES)
    for _ in range(12):
        run.step("left", "right", "up")
        run.world.ask("learner", Kept(take=run.takes))
    results = loaded(run)
    assert results.journal.numbers[0] > 1
    assert "were removed (buffer.archive=none)" in results.missing
    assert results.trajectories
    assert {one.fate for one in results.trajectories} == {"trained"}
    assert {one.step for one in results.trajectories} <= set(range(1, 13))
    run.close()
