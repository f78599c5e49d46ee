"""`launch.gpus`: which process sees which GPU, and what is refused before anything starts."""

from pathlib import Path

import pytest

from evolver_async.config import (
    ActorsConfig,
    Config,
    ConfigError,
    EngineConfig,
    GpusConfig,
    LaunchConfig,
    LearnerConfig,
    StageConfig,
)
from evolver_async.config.load import check_run
from evolver_async.launch.child import LocalSpawner
from evolver_async.launch.supervisor import Supervisor
from evolver_async.launch.visible_gpus import (
    VISIBLE,
    check_visible,
    index_of,
    visible_gpus,
)


def node(*, wide: int = 1, actors: list[int], learner: list[int]) -> Config:
    return Config(
        engine=EngineConfig(tensor_parallel=wide),
        actors=ActorsConfig(count=max(1, len(actors) // wide)),
        learner=LearnerConfig(ranks=max(1, len(learner))),
        launch=LaunchConfig(gpus=GpusConfig(actors=actors, learner=learner)),
        stages=[StageConfig(steps=1)],
    )


def seen(config: Config, here: str | None = None) -> list[str | None]:
    """What every actor sees, then every rank of the learner."""
    actors = [("actor", index) for index in range(config.actors.count)]
    ranks = [("learner", index) for index in range(config.learner.ranks)]
    return [visible_gpus(config, *child, here).get(VISIBLE) for child in actors + ranks]


@pytest.mark.parametrize(
    ("config", "here", "expected"),
    [
        (node(actors=[0], learner=[0]), None, ["0", "0"]),
        (node(actors=[0, 1, 2], learner=[6, 7]), None, ["0", "1", "2", "6", "7"]),
        (node(wide=2, actors=[0, 1, 2, 3], learner=[4]), None, ["0,1", "2,3", "4"]),
        (node(actors=[], learner=[1]), None, [None, "1"]),
        (node(actors=[], learner=[]), "3", [None, None]),
        # Counted within what a scheduler left this job, by number or by UUID.
        (node(actors=[0, 1], learner=[2]), "4,6,7", ["4", "6", "7"]),
        (node(wide=2, actors=[1, 0], learner=[]), "GPU-aa, GPU-bb", ["GPU-bb,GPU-aa", None]),
    ],
)
def test_every_process_sees_the_gpus_it_was_given(config, here, expected):
    assert seen(config, here) == expected
    assert (
        visible_gpus(config, "buffer", 0, here) == visible_gpus(config, "experience", 0, here) == {}
    )


@pytest.mark.parametrize("here", ["", "5", "5,6,7"])
def test_a_gpu_that_is_hidden_cannot_be_given_away(here):
    with pytest.raises(ConfigError, match=r"launch\.gpus\.learner: 3 is not within CUDA_VISIBLE"):
        check_visible(node(actors=[], learner=[3]), here)


def test_a_gpu_of_an_actor_that_may_come_later_must_be_visible_too():
    config = node(actors=[0, 1, 2], learner=[])
    config.actors.count, config.actors.max = 1, 3
    check_visible(config, "4,5,6")
    with pytest.raises(ConfigError, match=r"launch\.gpus\.actors: 2 is not within CUDA_VISIBLE"):
        check_visible(config, "4,5")


def test_numbers_of_names():
    assert [index_of(name) for name in ("learner", "actor-3", "actor-12")] == [0, 3, 12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actors": [0, 1, 2], "wide": 2}, "launch.gpus.actors: must name 2 "),
        ({"actors": [1, 1], "wide": 2}, r"launch.gpus.actors: \[1, 1\] hold one model"),
        ({"learner": [2, 2]}, r"launch.gpus.learner: \[2, 2\] hold one model"),
        ({"actors": [-1]}, r"launch.gpus.actors\[0\]: must be at least 0"),
    ],
)
def test_gpus_that_cannot_be_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        check_run(node(**({"actors": [], "learner": []} | change)))


def test_two_actors_may_share_a_gpu_and_a_role_on_the_cpu_may_not_have_one():
    check_run(node(actors=[0, 0], learner=[0]))
    config = node(actors=[0], learner=[])
    config.engine.device = "cpu"
    with pytest.raises(ConfigError, match=r"engine\.device: must be cuda where launch\.gpus"):
        check_run(config)
    config = node(actors=[], learner=[0])
    config.launch.kind = "serial"
    with pytest.raises(ConfigError, match=r"launch\.gpus\.learner: launch\.kind=serial"):
        check_run(config)


@pytest.mark.process
def test_a_child_of_the_launcher_starts_with_its_gpus(tmp_path: Path, monkeypatch):
    """A real child: a stand-in for Python that writes down what it was started with."""
    monkeypatch.setenv(VISIBLE, "7,5,3")
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\necho "${VISIBLE}" >>{tmp_path}/seen\n')
    stand_in.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(stand_in))
    config = node(actors=[0], learner=[1, 2])
    spawner = LocalSpawner(config, tmp_path, f"ipc://{tmp_path}/b", tmp_path)
    launcher = Supervisor(config, tmp_path, spawner)
    launcher.add("actor", "actor-0").process.wait()
    for rank in launcher.add("learner", "learner").processes:
        rank.wait()
    launcher.add("buffer", "buffer").process.wait()
    assert sorted((tmp_path / "seen").read_text().split()) == ["3", "5", "7", "7,5,3"]
