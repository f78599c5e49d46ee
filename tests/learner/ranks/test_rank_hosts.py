"""Four ranks on two hosts, the second one in a network namespace of its own, beside one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from alike import assert_alike
from launches import free_port
from network import FarHost, far_host
from parallel_world import SAVED, Trained, be_rank, make_policies, read, train

pytestmark = pytest.mark.process

COUNT, HERE = 4, 2
KINDS = ("rl", "sft", "dpo", "ppo")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    """A directory with policies, and what one rank makes of them."""
    directory = tmp_path_factory.mktemp("hosts")
    make_policies(directory)
    return directory, {name: train(name, directory, directory / f"{name}-single") for name in KINDS}


@pytest.fixture(scope="module")
def far() -> Iterator[FarHost | None]:
    with far_host() as made:
        yield made


def be_rank_somewhere(rank: int, far: FarHost | None, *given: object) -> None:
    if far is not None and rank >= HERE:
        far.enter()
    be_rank(rank, COUNT, *given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("copies", "kinds"), [(1, ("rl",)), (2, KINDS)])
def test_four_ranks_on_two_hosts_have_the_losses_and_weights_of_one(
    copies, kinds, world, far, tmp_path
):
    before, single = world
    directory = tmp_path
    make_policies(directory)
    here = "127.0.0.1" if far is None else far.here
    addresses = [
        f"tcp://{here}:{free_port() if far is None else far.free_port()}" for _ in (*kinds, "again")
    ]
    plan = [(name, None) for name in kinds]
    plan.append(("rl", str(before / "rl-single" / "checkpoint")))
    given = far, directory, plan, "cpu", addresses, copies
    mp.spawn(be_rank_somewhere, args=given, nprocs=COUNT)  # pyright: ignore[reportPrivateImportUsage]
    for name in kinds:
        found = read(directory / f"{name}-whole-0")
        assert_alike(found.rows, single[name].rows, TOLERANCE)
        for key, tensor in single[name].weights.items():
            torch.testing.assert_close(found.weights[key], tensor, atol=1e-3, rtol=1e-3)
    assert_alike(read(directory / "rl-resumed-0").rows, single["rl"].rows[SAVED:], TOLERANCE)
    saved = directory / "rl-whole-0" / "checkpoint"
    last = COUNT // copies - 1
    assert (saved / f"model.{last}of{COUNT // copies}.safetensors").exists()
    again = train("rl", directory, directory / "again", resume=saved)
    assert_alike(again.rows, single["rl"].rows[SAVED:], TOLERANCE)
    if copies == 1:
        fewer = tmp_path / "fewer"
        make_policies(fewer)
        given = 3, fewer, [("rl", str(saved))]
        mp.spawn(be_rank, args=given, nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
        assert_alike(read(fewer / "rl-resumed-0").rows, single["rl"].rows[SAVED:], TOLERANCE)
