"""Preparation of a run's policy directory, before any other process is started."""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import dump, load_written, stage_config
from evolver_async.config.paths import embeds_by_model
from evolver_async.config.sections.weight_channel import channel
from evolver_async.config.shape import GGUF
from evolver_async.errors import TrainingError
from evolver_async.launch.pace import Pace, can_time
from evolver_async.launch.registry import resolve
from evolver_async.launch.run_directory import CONVERTED, CREATING
from evolver_async.launch.start_checks import check_teachers
from evolver_async.launch.visible_gpus import VISIBLE
from evolver_async.memory.gpu_needs import gpus_used
from evolver_async.model import gguf, layers, policy
from evolver_async.model.precision import FASTER, gains, load_policy, on_gpu
from evolver_async.model.tokenizer import same_tokens
from evolver_async.process.setup import RoleArgs
from learner.data.packing import Layout
from learner.optimize import model, reward_model, teacher
from learner.optimize.teacher_endpoint import TeacherEndpoint
from learner.tools.timed_passes import timed

log = logging.getLogger(__name__)

NAMES_KEY = re.compile(r"(policy|learner|reward_model|teacher)\.[a-z_.]+: ")


def main(args: RoleArgs) -> int:
    """Write the tiny preset if the run has no policy directory, or convert the .gguf file that it
    names; refuse a broken model.

    Decide for `policy.dtype=auto`, once for all processes of the run, and write it to the run's
    configuration: engines and learner have to round alike, whatever their hosts are faster with.
    ConfigError if the context is too short for the environment's prompts or too long for the model,
    if a key needs a GPU that is not here, or if the embedder cannot be loaded.
    """
    config = load_written(args.run_dir)
    for problem in _missing_gpus(config):
        raise ConfigError(problem)
    _check_embedder(config)
    try:
        scratch = config.policy.path == str(args.run_dir / "policy")
        config = _made(config, args.run_dir)
        if config.policy.dtype == "auto":
            config = _decide(config, args.run_dir, scratch)
        loaded = _load(config)
        if any(stage.kind == "reward_model" for stage in config.stages):
            reward_model.check(config)
        _check_teachers(config, model.layout_of(config, loaded))
    except policy.ModelError as error:
        said = " ".join(str(error).split())
        named = NAMES_KEY.match(said)
        raise ConfigError(said if named else f"policy.path: {said}") from error
    prompt = resolve("check_prompts")(config)
    new = (args.run_dir / CREATING).exists()  # else a change is checked
    if new and not scratch and can_time(config):
        pace = timed(config, loaded, prompt)
        if pace is not None:
            pace.write(args.run_dir)
    return 0


def pace_of(config: Config) -> Pace | None:
    """Return the pace of a recipe's model, which is a directory; None if it is not timed.

    ModelError for a broken one, ConfigError for what `main` refuses about model and prompts.
    """
    if not can_time(config):
        return None
    if config.policy.dtype == "auto":
        dtype, _ = _precision(config, False)
        config = replace(config, policy=replace(config.policy, dtype=dtype))
    loaded = _load(config)
    return timed(config, loaded, resolve("check_prompts")(config))


def _missing_gpus(config: Config) -> Iterator[str]:
    """Yield the keys that need a GPU which is not visible here. The nodes of Ray have their own.

    CUDA shows a process one part of a GPU (MIG) at most; the launcher gives each process its own,
    and has checked `launch.gpus` by their list.
    """
    if config.launch.kind == "ray":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = f"of {count} visible here, counted from 0" if count else "and no GPU is visible here"
    named, (engine, learner) = config.launch.gpus, gpus_used(config, count)
    for section, spread, key, given, used in (
        ("engine", "engine.tensor_parallel", "launch.gpus.actors", named.actors, engine),
        ("learner", "learner.ranks", "launch.gpus.learner", named.learner, learner),
    ):
        if given and count and "MIG-" in os.environ.get(VISIBLE, ""):
            continue
        last = max((*given, *used), default=-1)
        if last >= count:
            key = key if given else spread if len(used) > 1 else f"{section}.device"
            yield f"{key}: needs GPU {last}, {seen}"
    if channel(config) == "cuda_ipc" and not count:
        yield f"weights.kind: is cuda_ipc, {seen}"
    if not count and any(stage.learner.token_budget == 0 for stage in _stages(config)):
        yield "learner.token_budget: there is no GPU to measure; set a number of tokens"


def _check_embedder(config: Config) -> None:
    """Load the embedder once: without its service a run would go on, but unguided."""
    if embeds_by_model(config):
        try:
            resolve("embedder")(config.experience)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_teachers(config: Config, layout: Layout) -> None:
    """Load every teacher once, and ask an endpoint once. ModelError or ConfigError if one is of no
    use."""
    check_teachers(config)  # now that the policy has a tokenizer
    stages = [stage_config(config, index) for index in range(len(config.stages))]
    for path in {stage.teacher.path for stage in stages} - {""}:
        teacher.load(config, path, "cpu", layout, sharded=config.learner.ranks > 1)
        if not same_tokens(config.policy.path, path):
            log.info("teacher.path: another tokenizer; chunks of text are compared")
    if asked := [stage.teacher for stage in stages if stage.teacher.url]:
        tokenizer = policy.load_tokenizer(config.policy.path)
        row = tokenizer.encode("One, two; three.", add_special_tokens=False)
        try:
            TeacherEndpoint(asked[0]).top([row], lambda token: str(tokenizer.decode([token])))
        except TrainingError as error:
            raise ConfigError(str(error)) from error


def _stages(config: Config) -> Iterator[Config]:
    """Yield the configuration of every stage, and what a rollback would make of it."""
    for index, stage in enumerate(config.stages):
        staged = stage_config(config, index)
        yield staged
        if stage.kind == "rl" and staged.safety.action == "rollback":
            yield stage_config(config, index, rollbacks=1)


def _made(config: Config, run_dir: Path) -> Config:
    """Write the run's own policy directory, unless it is there; return a configuration that names
    it, which is also that of the run from then on."""
    directory = run_dir / "policy"
    if config.policy.path.endswith(GGUF):
        if not directory.exists():
            gguf.convert(Path(config.policy.path), directory)
        (run_dir / CREATING).write_text(CONVERTED)
        config = replace(config, policy=replace(config.policy, path=str(directory)))
        dump(config, run_dir / "config.yaml")
    elif config.policy.path == str(directory) and not directory.exists():
        policy.make_tiny(
            directory,
            seed=config.run.seed,
            hidden_size=config.policy.hidden_size,
            layers=config.policy.layers,
            heads=config.policy.heads,
            intermediate_size=config.policy.intermediate_size,
            max_length=config.policy.max_length,
            words=_vocabulary(config),
        )
    return config


def _decide(config: Config, run_dir: Path, scratch: bool) -> Config:
    """Write the precision of a run and return its configuration."""
    dtype, why = _precision(config, scratch)
    log.info("policy.dtype: %s, as %s", dtype, why)
    config = replace(config, policy=replace(config.policy, dtype=dtype))
    for index in range(len(config.stages)):
        stage_config(config, index)  # ConfigError for what this precision rules out
    dump(config, run_dir / "config.yaml")
    return config


def _precision(config: Config, scratch: bool) -> tuple[Literal["float32", "bfloat16"], str]:
    """Choose the precision of a run; return it and the reason.

    Numbers count more than speed where nothing is known: on the nodes of Ray, and where engine and
    learner would not round alike.
    """
    if scratch:
        return "float32", "the model is made from scratch"
    devices = config.learner.device, config.engine.device
    if all(
        "cuda" in device or (config.launch.kind != "ray" and on_gpu(device)) for device in devices
    ):
        return "bfloat16", "engine and learner are on GPUs"
    if config.launch.kind != "ray" and any(map(on_gpu, devices)):
        return "float32", "engine or learner is on a CPU, and the other on a GPU"
    if config.engine.kind == "vllm" or config.learner.ranks > 1:
        return "float32", "on CPUs vLLM and several ranks round otherwise than a single process"
    decoding, training = gains(policy.load_model(config.policy.path, dtype="float32", device="cpu"))
    chosen = "bfloat16" if min(decoding, training) >= FASTER else "float32"
    measured = f"{decoding:.2g} times as fast when decoding"
    measured += f", {training:.2g} when training" if training else ""
    return chosen, f"products in bfloat16 are {measured} ({FASTER} wanted)"


def _vocabulary(config: Config) -> list[str]:
    """Return the words of the environments; ConfigError if they cannot name them."""
    try:
        return resolve("vocabulary")(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _loaded(config: Config) -> PreTrainedModel:
    """Load the model on the CPU in the precision that the learner has, wherever that computes."""
    dtype, device = config.policy.decided_dtype, config.learner.device
    whole = config.learner.ranks > 1 or on_gpu(device)
    return load_policy(config.policy.path, dtype=dtype, device="cpu", sharded=whole)


def _load(config: Config) -> PreTrainedModel:
    """Load tokenizer and model once, and try what the engine and the learner make of the model,
    which is returned.

    ModelError whatever a library raises meanwhile; ConfigError if the engine cannot run it.
    """
    settings = config.policy
    try:
        tokenizer = policy.load_tokenizer(settings.path)
        loaded = _loaded(config)
        resolve("check_engine")(config, loaded, tokenizer)
        fitted = model.fit(config, loaded)
        if config.learner.compile and not on_gpu(config.learner.device):
            layers.check_compiler("cpu")  # that for a GPU is tried by the learner, where the GPU is
        return fitted
    except (policy.ModelError, ConfigError):
        raise
    except Exception as error:
        raise policy.ModelError(f"{type(error).__name__}: {error}") from error
