"""Checks before a start that need more than the configuration: paths, wings, addresses, GPUs."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from evolver_async.buffer.state.samplers import sampler_of
from evolver_async.config import Config, hub
from evolver_async.config.load import stage_config
from evolver_async.config.model_defaults import large_rates
from evolver_async.config.paths import check_paths, with_absolute_paths
from evolver_async.config.sections.weight_channel import host_and_port
from evolver_async.config.values.config_error import ConfigError
from evolver_async.launch.registry import check_wings
from evolver_async.launch.visible_gpus import VISIBLE, check_visible
from evolver_async.memory.gpu_needs import check_gpu_memory
from evolver_async.memory.host_memory import check_memory, uses_gpu
from evolver_async.memory.vllm_limits import check_vllm
from evolver_async.metrics.sinks import sink_of
from evolver_async.metrics.wandb_process import has_key
from evolver_async.model.tokenizer import ModelError, same_tokens
from evolver_async.process.http_address import check_free
from evolver_async.process.private_directories import PREFIX, sweep
from evolver_async.process.rendezvous import experience_address, keys_of
from evolver_async.weights.channel.interface import listen
from evolver_async.wire.addresses import IPC_PATH_BYTES
from evolver_async.wire.keys import KeysError, check_keys
from evolver_async.wire.server import check_address


def check_start(config: Config) -> None:
    """Raise ValueError, naming the key, for the first problem that a start would meet here."""
    config = with_absolute_paths(config)
    for check in CHECKS:
        check(config)


def problems_of(config: Config) -> list[str]:
    """Return all problems that a start would meet here, each naming its key."""
    config, problems = with_absolute_paths(config), []
    for check in CHECKS:
        try:
            check(config)
        except ValueError as error:
            problems.append(str(error))
    return problems


def check_rates(config: Config) -> None:
    """Raise ConfigError for a learning rate that would ruin the trained model of `policy.path`."""
    stages = [stage_config(config, index) for index in range(len(config.stages))]
    for problem in large_rates(config, stages):
        raise ConfigError(problem)


def check_teachers(config: Config) -> None:
    """Raise ConfigError for a teacher that is no model, or whose tokens are others than those of
    the policy although its divergence compares tokens. The preset has none before it is made."""
    for index in range(len(config.stages)):
        teacher = stage_config(config, index).teacher
        path = Path(teacher.path)
        if not teacher.path:
            continue
        if teacher.path == config.teacher.path and hub.is_id(teacher.path):
            if not config.policy.download:
                named = replace(config.policy, path=teacher.path, revision="")
                hub.snapshot(named, "teacher.path")
            continue
        for name in hub.NEEDED:
            if not (path / name).is_file():
                raise ConfigError(f"teacher.path: {path} has no {name}")
        if not Path(config.policy.path, "tokenizer.json").is_file():
            continue
        try:
            same = same_tokens(config.policy.path, path)
        except ModelError as error:
            raise ConfigError(f"teacher.path: {error}") from error
        if not same and teacher.divergence != "reverse":
            other = f"{path} has another tokenizer than the policy"
            raise ConfigError(f"teacher.divergence: must be reverse: {other}")


def _check_ray(config: Config) -> None:
    found = find_spec("ray")
    if config.launch.kind == "ray" and (found is None or found.origin is None):  # a folder has none
        install = "pip install 'evolver-async[ray]'"
        raise ConfigError(f"launch.kind: ray needs Ray, which is not installed: run {install}")


def _check_gpus(config: Config) -> None:
    check_visible(config, os.environ.get(VISIBLE))


def _check_vllm(config: Config) -> None:
    check_vllm(config, uses_gpu(config.engine.device))


def _sweep(config: Config) -> None:
    """Remove what killed launches have left where weights go: it would count as used memory."""
    with suppress(OSError):
        sweep(Path(config.weights.dir))


def _check_wandb(config: Config) -> None:
    if config.metrics.wandb == "online" and not has_key():
        raise ConfigError("metrics.wandb: online needs a key; set WANDB_API_KEY or run wandb login")


def _check_prometheus(config: Config) -> None:
    if config.metrics.prometheus:
        check_free("metrics.prometheus", config.metrics.prometheus)


def check_addresses(config: Config) -> None:
    """Raise ConfigError for invalid keys, and for an address that is open to others or in use.

    The nodes of a cluster have the addresses of its run, so they alone can tell the latter.
    """
    if config.launch.kind == "serial":
        return
    here, keys = config.launch.kind == "local", keys_of(config)
    addresses = [("buffer.address", config.buffer.address)]
    if config.experience.pooled and config.experience.address:
        addresses.append(("experience.address", config.experience.address))
    elif config.experience.pooled and config.buffer.address:
        derived = experience_address(config, config.buffer.address)
        addresses.append(("buffer.address", derived))
    others = [("weights.address", config.weights.address)]
    if config.learner.hosts > 1:
        others.append(("learner.address", config.learner.address))
    if here and config.rollout.agent:
        check_free("rollout.endpoint.bind", f"{config.rollout.endpoint.bind}:0")
    _refuse_equal([*addresses, *others, ("metrics.prometheus", config.metrics.prometheus)])
    try:
        if keys is not None:
            check_keys(keys)
        for name, address in addresses:
            if here and address:
                _check_address(name, address, keys)
    except KeysError as error:
        raise ConfigError(f"security.keys: {error}") from None
    for key, address in others if here else ():
        try:
            if address:
                listen(*host_and_port(address), key).close()
        except OSError as error:
            raise ConfigError(str(error.strerror)) from None


def check_temporary(config: Config) -> None:
    """Raise ConfigError if the path of a socket of the launch would be too long for the kernel."""
    if config.launch.kind == "serial" or config.buffer.address:
        return
    path = str(Path(tempfile.gettempdir(), f"{PREFIX}12345678", "buffer"))
    if not config.experience.address:
        path = experience_address(config, path) or path  # the longer one
    size = len(os.fsencode(path))
    if size > IPC_PATH_BYTES:
        raise ConfigError(
            f"buffer.address: its socket in {tempfile.gettempdir()} (TMPDIR) would have a path of"
            f" {size} bytes, more than {IPC_PATH_BYTES}; set a shorter TMPDIR"
        )


def _refuse_equal(addresses: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError for an address that two keys name."""
    names: dict[str, str] = {}
    for name, address in addresses:
        place = address.removeprefix("tcp://")
        other = names.setdefault(place, name)
        if place and other != name:
            raise ConfigError(f"{name}: {address} is the address of {other} as well")


def _check_address(name: str, address: str, keys: Path | None) -> None:
    try:
        check_address(address, keys)
    except KeysError:
        raise
    except ValueError as error:
        raise ConfigError(str(error).replace("buffer.address", name, 1)) from None
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def _check_own(config: Config) -> None:
    """Raise ValueError for a sampler or a metric sink of one's own that cannot be used."""
    for staged in (config, *(stage_config(config, i) for i in range(len(config.stages)))):
        sampler_of(staged.buffer.sampler)
    for name in config.metrics.sinks:
        sink_of(name)


CHECKS = (
    *(
        check_paths,
        check_teachers,
        check_rates,
        check_wings,
        _check_own,
        check_addresses,
        check_temporary,
        _check_prometheus,
    ),
    *(_check_ray, _check_gpus, _check_wandb, _sweep, _check_vllm),
    *(check_memory, check_gpu_memory),
)
