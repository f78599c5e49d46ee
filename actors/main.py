"""Start of an actor: it joins a run at one address and receives everything else from it."""

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from actors.checks.config import check_own, check_servers, probe
from actors.endpoint.runner import make_agents
from actors.engines.factory import follow_weights
from actors.envs.base import env_class, make_env
from actors.experience.guide import ExperienceGuide, ServiceBackend
from actors.experience.own_backend import own_backend
from actors.failure_counts import FailureCounts
from actors.formats.chat import Chat
from actors.judge.configured_judge import make_judge
from actors.postprocess import ActorComponents
from actors.questioning.questioner import make_questioner
from actors.rewards.scorer import RewardScorer, scores
from actors.rollout.environment import IdleEnvironments
from actors.scripted.reflection import Reflector
from actors.worker import ActorReplaced, Worker
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.buffer.tasks.task_source import MixturePart
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import from_dict, stage_config
from evolver_async.config.secrets import reveal
from evolver_async.config.sections.reward import REWARD_MODEL
from evolver_async.errors import USER_ERROR
from evolver_async.extension import is_own
from evolver_async.file_formats import RUN
from evolver_async.model import policy
from evolver_async.model.tokenizer import ModelError
from evolver_async.process.garbage import collect_rarely, give_back_memory
from evolver_async.process.package_versions import versions
from evolver_async.process.setup import RoleArgs
from evolver_async.terminal import say
from evolver_async.wire import messages
from evolver_async.wire.addresses import beside
from evolver_async.wire.client import Client, Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import SCHEMA_HASH
from evolver_async.wire.heartbeat import Heartbeat
from evolver_async.wire.names import unresolved

UNPLAYABLE = f"host {socket.gethostname()} cannot play the run's episodes"
LEAVE_S = 5.0
CONVERSATIONS = "conversations"  # below the run directory, or the working directory of an actor
NAME_S = 20.0  # a cluster can publish the name of a host after it has started an actor

log = logging.getLogger(__name__)


def build(
    config: Config,
    client: Client,
    weights_address: str,
    name: str,
    incarnation: int,
    experience: Client | None = None,
    run_dir: Path | None = None,
) -> Worker:
    """Build a worker for any launcher. Its engine begins without weights: the first head brings
    them.

    `experience`: a client of the experience service, where there is one. `run_dir`: has the reward
    models that the run trains, and the actor's conversations with people.
    """
    failures, reflection = FailureCounts(), config.reflection
    idle = IdleEnvironments(config.env.processes)
    tell = partial(failures.note, "engine", config.engine.kind)
    engine, source, tokenizer = follow_weights(config, weights_address, name, tell)
    chat = Chat(tokenizer, config.rollout.template)
    told = run_dir and run_dir / CONVERSATIONS / f"{config.run.name}.{name}.sqlite"
    guide = make_guide(config, experience, failures)
    components = ActorComponents(
        judge=make_judge(config, engine, chat, failures),
        guide=guide,
        questioner=make_questioner(config, failures, idle, guide),
        reflector=Reflector(reflection, failures) if reflection.kind == "llm" else None,
        agents=make_agents(config, engine, chat, failures, told),
        failures=failures,
        idle=idle,
        scorer=RewardScorer(config, failures, run_dir) if scores(config) else None,
    )
    return Worker(config, client, source, engine, chat, name, incarnation, components)


def make_guide(
    config: Config, service: Client | None, failures: FailureCounts
) -> ExperienceGuide | None:
    """Make the guide over the experience service or the user's own backend; None without either."""
    if service is not None:
        return ExperienceGuide(ServiceBackend(service), config.experience, failures)
    if is_own(config.experience.kind):
        return ExperienceGuide(own_backend(config), config.experience, failures)
    return None


async def join(client: Client, tokenizer: str | None = None) -> messages.Welcome:
    """Return what the buffer says of the run. ConfigError if it refuses this actor, as it does one
    with another `tokenizer`."""
    host, pid = socket.gethostname(), os.getpid()
    hello = messages.Hello(role="actor", schema_hash=SCHEMA_HASH, host=host, pid=pid)
    hello.versions, hello.tokenizer = versions(), tokenizer
    try:
        return await client.request(hello)
    except Rejected as error:
        raise ConfigError(f"--connect: {error}") from None


async def leave(client: Client, launch: int) -> None:
    """Tell the buffer that this actor is not going to ask for tickets."""
    with suppress(TimeoutError, Rejected):
        await client.request(messages.Lease(credit=0, launch=launch), timeout_s=LEAVE_S)


def tokenizer_of(config: Config, *, launched: bool) -> str:
    """Return the hash of the tokenizer on this host.

    Raise ConfigError if it has none. On the launcher's host it was there before: ModelError, after
    which the launcher tries again.
    """
    try:
        return policy.tokenizer_hash(config.policy.path)
    except ModelError as error:
        if launched:
            raise
        raise ConfigError(f"{UNPLAYABLE}: policy.path: {error}") from error


def check_host(config: Config, *, probes: bool, run_dir: Path | None = None) -> None:
    """Raise ConfigError for what the run's episodes need and this host lacks: a variable, code of
    the user's, the reward model that the run trains unless `run_dir` is the run's, and with
    `probes` a requirement of an environment, such as a sandbox.

    A lack that only a task reveals would be that task's failure and quarantine it for all actors.
    Lines of a task file are not checked: only the launcher's host has the file.
    """
    model, stages = config.reward.model, range(len(config.stages))
    terms = [term.name for index in stages for term in stage_config(config, index).reward.terms]
    own = REWARD_MODEL in terms and not (model.path or model.url)
    if own and run_dir is not None and not (run_dir / RUN).exists():
        where = "is in the run's directory, and no run is in"
        advice = "start the actor in it, on a file system of both hosts, or set reward.model.url"
        problem = f"the model that the run trains {where} {run_dir}: {advice}"
        raise ConfigError(f"{UNPLAYABLE}: reward.terms: {REWARD_MODEL}: {problem}")
    parts = dict[tuple[str, str], MixturePart]()
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        reveal(staged.env.params)
        for number, part in enumerate(staged.tasks.mixture):
            reveal(part.params, f"tasks.mixture[{number}].params")
        for name, chosen in staged.eval.sets.items():
            reveal(chosen.env.params, f"eval.sets.{name}.env.params")
        try:
            check_own(staged)
            if staged.tasks.path and not staged.rollout.agent:
                env_class(staged.env.name)
        except ValueError as error:
            raise ConfigError(f"{UNPLAYABLE}: {error}") from error
        if not (staged.tasks.path or staged.rollout.agent):
            sources = source_of(staged), *(one.source for one in eval_sets_of(staged).values())
            found = (part for source in sources for part in source.parts)
            parts |= {(part.env, repr(part.params)): part for part in found}
    try:
        if probes:
            check_servers(config)
        for part in parts.values():
            env = make_env(part.env, part.params)
            if probes:
                probe(part.env, env)
    except ValueError as error:
        raise ConfigError(f"{UNPLAYABLE}: {error}") from error


def await_name(address: str) -> None:
    """Return once the host of an address is known. ConfigError if it stays unknown."""
    deadline, logged = time.monotonic() + NAME_S, ""
    while problem := unresolved(address):
        if time.monotonic() >= deadline:
            raise ConfigError(f"--connect: {address}: {problem}")
        if problem != logged:
            log.warning("%s: %s; trying again for %.0f s", address, problem, NAME_S)
            logged = problem
        time.sleep(1.0)


def serve(args: RoleArgs) -> None:
    """Join the run at `args.address`, receive everything else from it, work until stopped."""
    try:
        client = _connect(args, args.address, "")
    except ValueError as error:
        raise ConfigError(f"--connect: {error}") from None
    if args.parent_pid is None:
        await_name(args.address)
    try:
        welcome = asyncio.run(join(client))
        config = from_dict(welcome.config)
        try:
            asyncio.run(join(client, tokenizer_of(config, launched=args.parent_pid is not None)))
            # No loop runs meanwhile, as an environment's own calls can run coroutines. The launcher
            # has probed its own host, where its actors run unless Ray places them: a service that
            # is down when one is started again must not end the run.
            check_host(config, probes=args.parent_pid is None, run_dir=args.run_dir)
        except ValueError:
            asyncio.run(leave(client, welcome.launch))
            raise
        asyncio.run(work(args, client, config, welcome))
    finally:
        client.close()


async def work(
    args: RoleArgs, client: DealerClient, config: Config, welcome: messages.Welcome
) -> None:
    """Build the worker of a run that was joined, and let it work until it is stopped."""
    say(f"joined {welcome.run_id} at {args.address} as {args.name}", flush=True)
    address = beside(welcome.experience_address, args.address)
    experience = _connect(args, address, welcome.run_id) if address else None
    identity = args.name, args.incarnation
    worker: Worker | None = None

    def beat() -> messages.Beat:
        loads = "start of vLLM" if config.engine.kind == "vllm" else "load of the model"
        return messages.Beat(role="actor", phase=loads) if worker is None else worker.beat()

    whose = args.address, welcome.run_id, *identity, args.keys
    heartbeat = Heartbeat(*whose, warn_s=config.buffer.warn_s, read=beat)
    heartbeat.start()
    try:
        worker = build(config, client, welcome.weights_address, *identity, experience, args.run_dir)
        worker.tickets.launch = welcome.launch
        collect_rarely()
        give_back_memory()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop.set)
        await worker.run()
    finally:
        heartbeat.stop()


def _connect(args: RoleArgs, address: str, run_id: str) -> DealerClient:
    return DealerClient(address, run_id, args.name, args.incarnation, keys=args.keys)


def main(args: RoleArgs) -> int:
    """Run the role `actor`. An actor that lost its name, or whose run has been launched anew with
    other settings and addresses, ends; only a launcher restarts its own."""
    try:
        serve(args)
    except ActorReplaced as error:
        log.error("%s", error)
        return USER_ERROR if args.parent_pid is None else 1
    return 0
