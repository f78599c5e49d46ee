"""Registry of roles: the functions of the wings by name.

A name is resolved where a process starts, so that nothing in `evolver_async` imports a wing.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evolver_async.process.garbage import permanent_imports

if TYPE_CHECKING:  # the command line imports this module and must start fast
    from evolver_async.config import Config

# Processes: main(RoleArgs) -> exit code.
PROCESSES = {
    "buffer": "evolver_async.buffer.service:main",
    "learner": "learner.main:main",
    "actor": "actors.main:main",
    "experience": "actors.experience.experience_service:main",
    "prepare": "learner.tools.prepare:main",
}
# Launchers by launch.kind: run(config, run_dir) -> exit code.
LAUNCHERS = {
    "serial": "evolver_async.launch.serial:run",
    "local": "evolver_async.launch.local:run",
    "ray": "evolver_async.launch.ray_cluster:run",
}
# Everything else that a wing offers by name.
ROLES = PROCESSES | {
    "eval": "actors.evaluate:evaluate",  # (run_dir, episodes, step, split, file) -> text
    "eval_model": "actors.evaluate:evaluate_model",  # (config, episodes, file) -> text
    "exact": "actors.envs.exact:exact",  # (tasks, max_turns) -> values, None without
    "embedder": "actors.experience.embedders:load_embedder",  # (experience) -> embedder, cosine
    "vocabulary": "actors.envs.vocabulary:vocabulary_of",  # (config) -> words
    "check_engine": "actors.engines.model_check:check",  # (config, model, tokenizer) -> None
    "check_prompts": "actors.checks.prompt_checks:check",  # (config) -> most tokens of a prompt
    "held_out": "actors.scripted.recorded:held_out_groups",  # (tasks, stage, index, kind) -> groups
    "decode_times": "actors.engines.decode_timing:decode_times",  # -> rows, seconds
    "pace": "learner.tools.prepare:pace_of",  # (config) -> Pace or None
    "formats": "actors.rollout.episode_config:with_formats",  # (config) -> config without auto
    "export": "learner.tools.export:export",  # (run_dir, out, step, examples) -> line
    "export_reward_model": "learner.tools.export:export_reward_model",  # (run_dir, out, step)
    "manual": "actors.export_manual:write_manual",  # (config, directory, examples) -> None
    "copy_pool": "actors.experience.pool_file:copy_pool",  # (directory, new directory) -> None
    "guidance": "actors.experience.at_use:guidance",  # (run_dir, query) -> text
    "purge": "actors.experience.experience_service:purge_files",  # -> entries taken out
    "rerun": "learner.rerun.verification:rerun",  # (plan, progress) -> exit code and lines
    "serial_actor": "actors.main:build",
    "serial_experience": "actors.experience.experience_service:build",
    "serial_learner": "learner.main:build",
}
# Checks of a configuration that need a wing: each raises ValueError and names the key.
CHECKS = ("actors.checks.config:check", "learner.checks:check")


def resolve(entry_point: str) -> Callable[..., Any]:
    """Import and return the function of a role's name, or of `module:function`.

    Ctrl-C meanwhile is KeyboardInterrupt, whatever an imported module makes of it.
    """
    name, _, function = ROLES.get(entry_point, entry_point).partition(":")
    if name in sys.modules:
        return getattr(importlib.import_module(name), function)
    try:
        with permanent_imports():
            return getattr(importlib.import_module(name), function)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        raise


def check_wings(config: "Config") -> None:
    """Raise ValueError, naming the key, if one of the wings refuses the configuration."""
    for check in CHECKS:
        resolve(check)(config)
