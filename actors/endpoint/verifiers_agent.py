"""Agent that plays tasks of verifiers in the package's own environment.

`rollout.agent=actors.endpoint.verifiers_agent:play` with `env.name=verifiers`. Tools, turns and
runtimes are the package's business; every call of its model comes to the endpoint.
"""

import asyncio
import importlib
from typing import Any

from actors.adapters.verifiers_env import Verifiers, package
from actors.endpoint.outcome import AgentOutcome
from actors.envs.base import EnvError, make_env, one_line
from evolver_async.extension import RAISED
from evolver_async.schema import Task

KEY_HEADER = "x-api-key"  # the package reads the other header's key from a variable of the process
RUNTIME = {"type": "subprocess"}  # the package's default asks for a login
SHELL, CHAT = "bash", "null"  # harnesses: the package's default, and one that runs nothing itself


async def play(*, base_url: str, api_key: str, task: Task, seed: int) -> AgentOutcome:
    """Play one episode. Raise EnvError for an environment that cannot be played, RuntimeError for
    what the package reports as an error of the episode."""
    env = make_env(task.env, task.params)
    if not isinstance(env, Verifiers) or env.play is None:
        raise EnvError("env.params.play: is missing: this agent plays env.name=verifiers with it")
    vf = package()
    chosen, world = await asyncio.to_thread(lambda: (env.chosen(task), _world(env, task.split)))
    client = vf.EvalClientConfig(
        base_url=base_url, api_key_var="none", headers={KEY_HEADER: api_key}
    )
    async with world.serving():
        episode = await world.run_episode(chosen, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
        raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors))
    (trace,) = episode.traces
    reward = float(trace.reward)
    return AgentOutcome(reward=reward, success=reward >= env.success_at)


def _world(env: Verifiers, split: str) -> Any:
    """Make the package's environment of a taskset."""
    vf, loaders = package(), importlib.import_module("verifiers.v1.utils.loaders")
    given = dict(env.play or {})
    try:
        kind = loaders.env_config_type(env.taskset, given.get("id", ""))
        fields = kind.model_fields.items()
        roles = [name for name, one in fields if isinstance(one.default, vf.AgentConfig)]
        if len(roles) != 1:
            raise EnvError(f"env.params.play: {env.taskset} has {len(roles)} agents, not one")
        agent = {"runtime": RUNTIME} | given.get(roles[0], {})
        if loaders.default_harness_id(env.taskset) == SHELL:
            agent = {"harness": {"id": CHAT}} | agent
        given |= {roles[0]: agent, "taskset": env.arguments(split)}
        return loaders.load_environment(kind.model_validate(given))
    except EnvError:
        raise
    except RAISED as error:  # other people's code
        raise EnvError(f"env.params.play: {one_line(error)}") from error
