"""A learner of two ranks is a learner of one: same losses, same weights, same checkpoints.

Ranks are spawned processes that meet at a file and talk by gloo.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from alike import TOLERANCE, assert_alike
from parallel_world import SAVED, STEPS, Trained, be_rank, make_policies, read, train

from evolver_async.checkpoint import shards
from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.config.load import check_run
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.tail import Tail
from evolver_async.process.setup import RoleArgs
from learner.optimize.adamw import make_adamw, master, update
from learner.ranks.meeting import FileMeeting
from learner.ranks.mesh import alone, check_apart, join
from learner.run.rank_server import meeting

pytestmark = pytest.mark.process

KINDS = (
    *("rl", "bounded", "distill", "teacher", "teacher_text", "vcpo", "sft", "dpo", "kto"),
    *("reward_model", "ppo", "apart", "apart_lora", "moe"),
)
SHORT = ("bf16", "apart_bf16")
RESUMED = ("rl", "reward_model", "ppo", "apart", "apart_lora")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    """A directory in which two ranks have trained, and what one rank made of the same."""
    directory = tmp_path_factory.mktemp("ranks")
    make_policies(directory)
    single = {
        name: train(name, directory, directory / f"{name}-single") for name in (*KINDS, *SHORT)
    }
    plan: list[tuple[str, str | None]] = [
        (name, None) for name in (*KINDS, *SHORT, "measured", "poisoned", "unfit", "slow")
    ]
    plan += [(name, str(directory / f"{name}-single" / "checkpoint")) for name in RESUMED]
    mp.spawn(be_rank, args=(2, directory, plan), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return directory, single


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_losses_and_weights_of_one(name, world):
    directory, single = world
    both = read(directory / f"{name}-whole-0")
    # Moments that begin anew, as after an update that is taken back, make more of rounding.
    assert_alike(both.rows, single[name].rows, 1e-3 if name == "bounded" else TOLERANCE)
    named = "loss/reward_model" if name == "reward_model" else "loss/policy"
    losses = [row.get(named) for row in both.rows]  # none without an update
    assert len(both.rows) == STEPS and len(set(losses)) == STEPS, "it must have trained"
    assert both.weights.keys() == single[name].weights.keys()
    for key, tensor in single[name].weights.items():
        # Adam's first steps are of size lr whatever the gradient: rounding may turn one around.
        torch.testing.assert_close(both.weights[key], tensor, atol=1e-3, rtol=1e-3)


def test_two_ranks_end_a_step_at_the_same_update(world):
    """Each sees the tokens of its own micro-batches; the bound is on those of both."""
    directory, single = world
    both = read(directory / "bounded-whole-0")
    assert both.filtered == single["bounded"].filtered
    updates = [row["learner/updates"] for row in both.rows]
    assert updates == [row["learner/updates"] for row in single["bounded"].rows]
    assert {*updates} == {0.0, 1.0, 2.0, 4.0}, "of 4 each: without a cut nothing is compared"
    assert {row["learner/taken_back"] for row in both.rows} == {0.0, 1.0}


@pytest.mark.parametrize("name", RESUMED)
def test_one_rank_goes_on_from_the_checkpoint_of_two(name, world, tmp_path):
    directory, single = world
    saved = directory / f"{name}-whole-0" / "checkpoint"
    assert (saved / "model.0of2.safetensors").exists()
    alone_again = train(name, directory, tmp_path / "again", resume=saved)
    assert_alike(alone_again.rows, single[name].rows[SAVED:])


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_go_on_from_the_checkpoint_of_one(name, world):
    directory, single = world
    assert_alike(read(directory / f"{name}-resumed-0").rows, single[name].rows[SAVED:])


def test_a_slow_rank_is_named_with_its_factor_and_its_price(world):
    directory, _ = world
    row = read(directory / "slow-whole-0").rows[-1]
    assert row["learner/slowest_rank"] == 1 and row["learner/slowest_factor"] > 1.5
    assert row["learner/slowest_s"] > 0.02


@pytest.mark.parametrize(
    ("name", "parts"),
    [("rl", ("model", "optimizer", "reference")), ("apart", ("critic", "critic_optimizer"))],
)
def test_no_rank_writes_more_than_its_share(name, parts, world):
    directory, _ = world
    saved = directory / f"{name}-whole-0" / "checkpoint"
    whole = directory / f"{name}-single" / "checkpoint"
    for part in parts:
        assert shards.read(saved, part).keys() == shards.read(whole, part).keys()
        for rank in range(2):
            share = (saved / f"{part}.{rank}of2.safetensors").stat().st_size
            assert share < 0.65 * (whole / f"{part}.safetensors").stat().st_size


def test_a_loss_of_one_rank_that_is_not_finite_is_a_step_of_none(world):
    directory, _ = world
    both = read(directory / "poisoned-whole-0")
    assert all(set(filtered) == {"non_finite"} for filtered in both.filtered)
    start = shards.read(directory / "plain", "model")
    assert all(torch.equal(tensor, start[name]) for name, tensor in both.weights.items())
    assert len(list((directory / "poisoned-whole-0" / "bad").iterdir())) == len(both.filtered)
    assert not (directory / "poisoned-whole-1" / "bad").exists(), "rank 0 alone keeps the batch"


def test_an_own_correction_that_is_not_finite_on_one_rank_is_named(world):
    """Rank 0, which writes the alerts, has not seen the numbers."""
    directory, _ = world
    titles = {
        row["title"]: "returned numbers that are not finite: weight_N" in row["text"]
        for row in Tail(directory / "unfit-whole-0" / ALERTS).rows()
    }
    assert titles == {"not finite": True, "step skipped": True}


@pytest.mark.parametrize("name", SHORT)
def test_bfloat16_ranks_publish_what_they_run_and_keep_what_they_train(name, world):
    directory, single = world
    both = read(directory / f"{name}-whole-0")
    # Ranks round whole layers, one process its products alone, so that a token can cross a bound:
    # shares of tokens differ by one of 40 at most.
    shares = {key for key in single[name].rows[0] if re.search("clip|masked", key)}
    for kept, tolerance in ((lambda key: key not in shares, 0.02), (shares.__contains__, 1 / 40)):
        rows = [{k: x for k, x in one.rows[0].items() if kept(k)} for one in (both, single[name])]
        assert_alike(rows[:1], rows[1:], tolerance=tolerance)
    assert {tensor.dtype for tensor in both.weights.values()} == {torch.bfloat16}
    for part in ("model", "critic") if name == "apart_bf16" else ("model",):
        kept = shards.read(directory / f"{name}-whole-0" / "checkpoint", part)
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
        matrices = [one for key, one in kept.items() if "head" not in key and one.ndim > 1]
        rounded = [not torch.equal(one, one.bfloat16().float()) for one in matrices]
        assert all(rounded), "masters must hold more than the weights that take part"


def test_passes_that_only_look_leave_nothing_behind(world):
    directory, _ = world
    assert (directory / "rl-whole-0" / "checkpoint" / "reference.0of2.safetensors").exists()
    assert read(directory / "rl-whole-0").passes == 0


def test_the_ranks_agree_on_a_budget_that_the_fullest_of_them_can_take(world):
    """The second has 1 MB free, of which a token takes 1 KiB; see parallel_world.Faked.

    A third of that stays free for the optimizers: all would be 768 tokens. If the first saw to its
    own passes alone they would be 1024, to its own memory alone 1280.
    """
    directory, single = world
    both = read(directory / "measured-whole-0")
    assert {row["learner/token_budget"] for row in both.rows} == {512}
    given = single["apart"].rows[0]["learner/token_budget"]
    rows = [row | {"learner/token_budget": given} for row in both.rows]
    assert_alike(rows, single["apart"].rows)


# ---- bfloat16 alone


def test_steps_smaller_than_bfloat16_can_tell_add_up_in_the_masters(tmp_path):
    """lr 1e-4 on weights around 1 is below half a unit in the last place: 2⁻⁸."""
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = make_adamw([weight], betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    for _ in range(100):
        for _ in range(3):
            (weight.float().sum() / 3).backward()
        (done,) = update([(optimizer, 1e-4)], loss=1.0, grad_clip=1e9)
        assert done.applied and done.grad_norm == pytest.approx(4.0, rel=1e-2)
        assert weight.grad is None
    torch.testing.assert_close(master(weight).detach(), torch.full((4, 4), 0.99))
    assert torch.equal(weight, master(weight).bfloat16()) and weight[0, 0].item() < 1


def test_a_checkpoint_of_bfloat16_goes_on_bitwise(world, tmp_path):
    directory, single = world
    saved = directory / "bf16-single" / "checkpoint"
    again = train("bf16", directory, tmp_path / "again", resume=saved)
    assert again.rows == single["bf16"].rows[SAVED:]
    for name, tensor in single["bf16"].weights.items():
        assert torch.equal(tensor, again.weights[name])


# ---- shards


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(count, readers, tmp_path):
    whole = {
        "matrix": torch.randn(7, 3),
        "short": torch.randn(2),
        "scalar": torch.tensor(5.0),
    }
    for rank in range(count):
        held = {"scalar": whole["scalar"]} if rank == 0 else {}
        for name in ("matrix", "short"):
            start, end = shards.rows(len(whole[name]), rank, count)
            held[name] = whole[name][start:end]
        shards.write(tmp_path, "model", held, rank, count)
    for name, tensor in shards.read(tmp_path, "model").items():
        assert torch.equal(tensor, whole[name])
    with shards.Shards(tmp_path, "model") as stored:
        for name in ("matrix", "short"):
            found = [stored.rows(name, rank, readers) for rank in range(readers)]
            assert torch.equal(torch.cat(found), whole[name])
            mine = torch.chunk(whole[name], readers)  # how FSDP2 cuts
            assert all(torch.equal(a, b) for a, b in zip(found, mine, strict=False))


def test_a_missing_shard_is_an_error_that_names_it(tmp_path):
    for rank in (0, 2):
        shards.write(tmp_path, "model", {"a": torch.zeros(1)}, rank, 3)
    with pytest.raises(ValueError, match=r"model: shards \[0, 2\] of 3"):
        shards.read(tmp_path, "model")
    with pytest.raises(FileNotFoundError, match=r"critic\.safetensors"):
        shards.read(tmp_path, "critic")


# ---- what ranks refuse


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("learner.ranks", lambda one: setattr(one.launch, "kind", "serial")),
        ("weights.kind", lambda one: setattr(one.weights, "kind", "cuda_ipc")),
        ("learner.device", lambda one: setattr(one.learner, "device", "cuda:1")),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_by_its_key(key, change):
    settings = Config(stages=[StageConfig(kind="rl", steps=9)])
    settings.learner.ranks = 2
    check_run(settings)
    change(settings)
    with pytest.raises(ConfigError, match=f"^{key}"):
        check_run(settings)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("learner.hosts", lambda one: setattr(one.learner, "ranks", 3)),
        ("learner.hosts", lambda one: setattr(one.launch, "kind", "ray")),
        ("learner.address", lambda one: setattr(one.learner, "address", "")),
        ("learner.trusted_network", lambda one: setattr(one.learner, "address", "tcp://far:1")),
    ],
)
def test_what_ranks_of_two_hosts_lack_is_refused_by_its_key(key, change):
    settings = Config(stages=[StageConfig(kind="rl", steps=9)])
    settings.learner.ranks = settings.learner.hosts = 2
    settings.learner.address = "tcp://127.0.0.1:4003"
    check_run(settings)
    change(settings)
    with pytest.raises(ConfigError, match=f"^{key}"):
        check_run(settings)


def leave_at_once(rank: int, directory: Path) -> None:
    """One of two spawned ranks: hears and is gone."""
    ranks = join(FileMeeting(directory / "meeting"), rank, 2, device="cpu", deadline_s=60.0)
    if rank == 0:
        ranks.tell(b"the end")
    else:
        ranks.hear()
    ranks.leave()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not [name for name in names if "gloo" in name], "it could abort this process at its end"


def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    mp.spawn(leave_at_once, args=(tmp_path,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]


def test_ranks_leave_nccl_the_network_that_weights_need(tmp_path, monkeypatch):
    """NCCL keeps to the interface of its first group, whichever the weights' group wants."""
    seen: list[dict[str, str | None]] = []

    class Met(Exception):
        pass

    def look(*_: object, **__: object) -> None:
        seen.append({name: os.environ.get(name) for name in INTERFACES})
        raise Met

    monkeypatch.setattr(torch.distributed, "init_process_group", look)
    monkeypatch.setenv(INTERFACES[1], "eth7")
    for address in ("tcp://127.0.0.1:4001", "tcp://trainer:4001"):
        settings = Config(stages=[StageConfig(kind="rl", steps=9)])
        settings.learner.ranks, settings.weights.address = 2, address
        args = RoleArgs(
            address="",
            name="learner",
            incarnation=0,
            run_dir=tmp_path,
            meeting=tmp_path / "meeting",
        )
        with pytest.raises(Met), meeting(settings, args):
            pass
    assert seen[0][INTERFACES[0]] == seen[0][INTERFACES[1]] == seen[1][INTERFACES[0]] != "eth7"
    assert seen[1][INTERFACES[1]] == os.environ[INTERFACES[1]] == "eth7"


@pytest.mark.parametrize(("gpus", "refused"), [(("A", "B"), []), (("A", "A"), [0, 1])])
def test_ranks_that_share_a_gpu_are_refused_by_the_key_that_parts_them(gpus, refused, tmp_path):
    errors: list[int] = []

    def be(rank: int) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "meeting"), 2)
        try:
            check_apart(store, rank, 2, f"GPU-{gpus[rank]}")
        except ConfigError as error:
            assert str(error).startswith("launch.gpus.learner: ranks 0 and 1")
            errors.append(rank)

    both = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert sorted(errors) == refused


# ---- the budget


def test_a_budget_leaves_no_rank_idle_and_is_the_limit_alone():
    one = alone("cpu")
    two = type(one)(one.device, 0, 2)
    four = type(one)(one.device, 0, 4)

    def never() -> np.ndarray:
        raise AssertionError("one rank needs no lengths")

    assert one.budget(1000, never) == 1000
    assert 19 <= two.budget(1000, lambda: np.array([10, 9, 9, 9])) < 37
    assert two.budget(12, lambda: np.array([10, 9, 9, 9])) == 12
    assert two.budget(1000, lambda: np.zeros(0, np.int64)) == 1000
    # Rows of a tree, which add what is their own: a pass holds at least one row whole.
    assert four.budget(1000, lambda: np.array([101, 0, 0, 0, 0])) == 101
    assert 4200 <= four.budget(10**6, lambda: np.array([4200, *[200] * 7])) <= 4600


# ---- deaths and deadlines


def stand_alone(rank: int, directory: Path, ready: Any) -> None:
    """Rank 0 calls; rank 1 dies, or never answers."""
    ready.wait()
    settings = Config()
    settings.learner.ranks, settings.learner.deadline_s = 2, 9.0
    args = RoleArgs(
        address="",
        name="learner",
        incarnation=0,
        run_dir=directory,
        rank=rank,
        meeting=directory / "meeting",
    )
    try:
        with meeting(settings, args) as ranks:
            assert ranks is not None
            if rank == 1:
                fate = (directory / "fate").read_text()
                os.kill(os.getpid(), signal.SIGKILL if fate == "dies" else signal.SIGSTOP)
            ranks.gather(b"x")
    except RuntimeError as error:
        (directory / "error").write_text(str(error))
    assert not torch.distributed.is_initialized(), "a process that leaves groups behind may crash"


@pytest.fixture
def ended() -> Iterator[list[mp.Process]]:  # pyright: ignore[reportPrivateImportUsage]
    processes: list[mp.Process] = []  # pyright: ignore[reportPrivateImportUsage]
    yield processes
    for process in processes:
        process.kill()


@pytest.mark.parametrize("fate", ["dies", "stands still"])
def test_a_rank_that_is_lost_ends_the_wait_of_the_others(fate, tmp_path, ended):
    (tmp_path / "fate").write_text(fate)
    context = mp.get_context("spawn")
    ready = context.Barrier(2)
    for rank in range(2):
        ended.append(context.Process(target=stand_alone, args=(rank, tmp_path, ready)))
        ended[-1].start()
    ended[0].join(240)
    assert ended[0].exitcode == 0 and (tmp_path / "error").read_text()
