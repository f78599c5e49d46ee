"""A rerun is planned only if the journal holds every group that it would train."""

import json
from pathlib import Path

import pytest
from reported_runs import SEGMENT_BYTES, MadeRun

from evolver_async.config import Config, ConfigError
from evolver_async.config.rerun_changes import changed_keys, refuse_data_changes
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.watch.live import EXACT, exact_values
from evolver_async.study.rerun import make_directory, plan
from evolver_async.wire.messages import Kept


def test_data_that_is_gone_is_named_with_the_way_to_keep_it(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", segment_bytes=SEGMENT_BYTES)
    for _ in range(12):
        run.step("left", "right", "up")
        run.world.ask("learner", Kept(take=run.takes))
    run.close()
    with pytest.raises(ConfigError, match=r"step 1: its take is no longer .*archive=all keeps"):
        plan(load_run(run.run_dir), [])


def test_the_first_missing_group_is_named(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", segment_bytes=SEGMENT_BYTES)
    taken = [run.step("left", "right", "up") for _ in range(6)]
    run.close()
    (run.run_dir / "journal" / "00000001.log").unlink()
    results = load_run(run.run_dir)
    assert 0 in results.history.line, "the next segment's snapshot tells of the take"
    with pytest.raises(ConfigError, match=rf"step 1: group {taken[0][0]} is no longer"):
        plan(results, [])


def test_takes_are_those_of_the_line_that_counts_in_their_order(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    takes = [run.step() for _ in range(3)]
    run.go_back(1)
    assert run.train() == takes[1]
    run.close()
    made = plan(load_run(run.run_dir), [])
    assert (made.begin, made.last, made.start) == (0, 1, None)
    assert [taken.groups for taken in made.line.values()] == takes[:2]
    assert [taken.lineage for taken in made.line.values()] == [1, 2]
    groups = made.takes.groups(1)
    assert [group.group_id for group in groups] == takes[1]
    assert [group.use for group in groups] == [0, 0], "the abandoned use does not count"
    head = groups[0].head
    assert head is not None and (head.lineage, head.step) == (1, 1), "lags are those of then"
    assert made.takes.trained(1) == set(takes[1])


def test_the_success_of_the_optimal_policy_is_copied_unless_it_is_torn(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.step()
    run.close()
    values = {"stage": 0, "episodes": 8, "random": 0.1, "optimal": 1.0}
    for name, content in (("whole", json.dumps({"values": [values]})), ("torn", '{"values": ')):
        (run.run_dir / EXACT).write_text(content)
        out = tmp_path / name
        make_directory(plan(load_run(run.run_dir), ["learner.lr=0.1"], None, out))
        assert (out / EXACT).exists() == (name == "whole")
    assert exact_values(tmp_path / "whole") == {(0, 8): values}


def test_a_run_without_a_complete_step_has_nothing_to_rerun(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.group(["left"])
    run.close()
    with pytest.raises(ConfigError, match="has no complete step"):
        plan(load_run(run.run_dir), [])


def test_changed_keys_are_named_in_full() -> None:
    after = Config()
    after.learner.lr = 0.5
    after.env.params = {"size": 9}
    after.stages[0].override = {"loss": {"boost": 0.1}}
    assert changed_keys(Config(), after) == {
        "learner.lr": 0.5,
        "env.params.size": 9,
        "stages.0.override.loss.boost": 0.1,
    }
    assert changed_keys(after, Config()).keys() == changed_keys(Config(), after).keys()


@pytest.mark.parametrize(
    "key", ["learner.groups_per_step", "learner.ranks", "selection.max_refills", "buffer.reuse"]
)
def test_a_rerun_drops_no_override_that_the_data_depends_on(key: str) -> None:
    section, name = key.split(".")
    before = Config()
    before.stages[0].override = {section: {name: 7}}
    with pytest.raises(ConfigError, match=rf"^stages\.0\.override\.{section}\.{name}: cannot"):
        refuse_data_changes(before, Config())
