"""Which weight channel a configuration means, and which it refuses, by key."""

import socket
import tempfile

import pytest

from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.config.sections.weight_channel import channel
from evolver_async.launch.start_checks import check_addresses, check_temporary

STEPS = "stages=[{kind: rl, steps: 1}]"
ONE_GPU = "launch.gpus={actors: [0], learner: [0]}"
CUDA = ("learner.device=cuda", "engine.device=cuda", "actors.count=1")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([], "shm"),
        (["launch.kind=serial"], "shm"),
        (["weights.kind=collective"], "collective"),
        (["weights.address=tcp://127.0.0.1:4001"], "collective"),
        (["weights.address=tcp://[::1]:4001"], "collective"),
        (["weights.address=tcp://node:4001", "weights.trusted_network=true"], "collective"),
        ([*CUDA, ONE_GPU], "cuda_ipc"),
        ([*CUDA, ONE_GPU, "weights.kind=shm"], "shm"),
        ([*CUDA, ONE_GPU, "engine.kind=vllm"], "shm"),
        ([*CUDA, "launch.gpus={actors: [1], learner: [0]}"], "shm"),
        ([*CUDA, "weights.kind=cuda_ipc"], "cuda_ipc"),
    ],
)
def test_the_channel_follows_from_the_configuration(arguments: list[str], kind: str) -> None:
    assert channel(load(None, [STEPS, *arguments])) == kind


@pytest.mark.parametrize(
    ("key", "others"),
    [("weights.address", []), ("learner.address", ["learner.hosts=2", "learner.ranks=2"])],
)
def test_an_address_in_use_is_refused_before_anything_starts(key: str, others: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = load(None, [STEPS, *others, f"{key}={address}"])
        with pytest.raises(ConfigError, match=rf"^{key}: 127\.0\.0\.1, port .* in use"):
            check_addresses(config)
    check_addresses(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["buffer.address=tcp://127.0.0.1:7001", "experience.address=tcp://127.0.0.1:7001"],
            "experience.address: tcp://127.0.0.1:7001 is the address of buffer.address as well",
        ),
        (
            ["weights.address=tcp://127.0.0.1:7001", "metrics.prometheus=127.0.0.1:7001"],
            "metrics.prometheus: 127.0.0.1:7001 is the address of weights.address as well",
        ),
        ([f"buffer.address=ipc:///tmp/{'a' * 92}"], "buffer.address: "),
    ],
)
def test_an_address_that_cannot_be_used_twice_or_is_too_long_is_refused_before_anything_starts(
    arguments: list[str], message: str
) -> None:
    config = load(None, [STEPS, "experience.kind=contrast", *arguments])
    with pytest.raises(ConfigError) as refused:
        check_addresses(config)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("kind", ["none", "contrast"])
def test_a_temporary_directory_with_too_long_a_path_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The service of experience has the longest address; without it a run would be unguided."""
    longest = {"none": 107, "contrast": 96}[kind] - len("/evolver-12345678/buffer")
    config = load(None, [STEPS, f"experience.kind={kind}"])
    monkeypatch.setattr(tempfile, "tempdir", "/".ljust(longest, "t"))
    check_temporary(config)
    monkeypatch.setattr(tempfile, "tempdir", "/".ljust(longest + 1, "t"))
    with pytest.raises(ConfigError, match=r"^buffer\.address: its socket in /t+ \(TMPDIR\) would"):
        check_temporary(config)
    check_temporary(load(None, [STEPS, "launch.kind=serial"]))


def test_an_address_of_ones_own_is_no_socket_in_the_temporary_directory() -> None:
    own = f"experience.address=ipc:///{'s' * 106}"
    check_temporary(load(None, [STEPS, "experience.kind=contrast", own]))


def test_the_keys_of_a_cluster_are_checked_and_its_addresses_are_not() -> None:
    elsewhere = [STEPS, "launch.kind=ray", "buffer.address=tcp://192.0.2.1:4000"]
    config = load(None, [*elsewhere, "security.keys=/nowhere"])
    with pytest.raises(ConfigError, match=r"^security\.keys: /nowhere: is not a directory"):
        check_addresses(config)
    weights = ["weights.address=tcp://192.0.2.1:4001", "weights.trusted_network=true"]
    check_addresses(load(None, [STEPS, "launch.kind=ray", *weights]))
