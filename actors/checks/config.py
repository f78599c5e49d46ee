"""Checks of the configuration against environments, turn formats and installed packages."""

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from actors.checks.thread_trial import check_threads
from actors.endpoint.conversations import user_keys
from actors.endpoint.external import start_key
from actors.endpoint.runner import load_agent
from actors.engines.vllm_options import problems
from actors.envs import base
from actors.envs.tool_server import tool_server
from actors.experience.own_backend import load_backend
from actors.formats.turns import FORMATS, THOUGHTFUL
from actors.formats.whole_message import extractor
from actors.judge.configured_judge import JUDGES
from actors.llm.endpoint_client import authorization
from actors.questioning.profile import load_profile
from actors.rewards.own_rewards import load_function
from actors.rewards.scorer import RewardScorer, check_terms
from actors.rollout.episode_config import format_name, format_of
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.buffer.tasks.data_files import DataTasks, check_examples
from evolver_async.buffer.tasks.rows import GivenTasks
from evolver_async.buffer.tasks.task_source import TaskSource
from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.config.paths import embeds_by_model
from evolver_async.config.sections.agentevolver import LLM_SECTIONS, SUMMARISED
from evolver_async.config.sections.rollout import EXTERNAL, USERS
from evolver_async.config.sections.run import BRANCHED, FINAL_SET
from evolver_async.extension import RAISED, implementation, is_own
from evolver_async.schema import Task
from evolver_async.splits import checked_split

PLAIN = (  # methods of an environment that cannot be async
    *("actions", "solve", "state", "snapshot", "restore", "score", "verdict", "goal", "exact"),
    *("probe", "content", "vocabulary"),
)

SERIAL_ASYNC = "is async, which needs real time: launch.kind=serial has none"


def check(config: Config) -> None:
    """Raise ValueError, naming the key, for an impossible environment, parameter, profile or turn
    format.

    Every stage is checked with its own overrides.
    """
    for name in LLM_SECTIONS:
        section = getattr(config, name)
        if section.kind == "llm":
            authorization(section.llm.key_env, f"{name}.llm.key_env")
    if embeds_by_model(config) and config.experience.embedder == "endpoint":
        authorization(config.experience.embedding.key_env, "experience.embedding.key_env")
    if config.engine.kind == "vllm":
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:
            raise ValueError(
                "engine.kind: vllm is not installed: pip install 'evolver-async[gpu]', or for CPU"
                " see docs/scaling.md, Engines"
            )
        for key, problem in problems(config.engine):
            raise ConfigError(f"{key}: {problem}")
    if config.experience.pooled and importlib.util.find_spec("faiss") is None:
        raise ValueError(
            f"experience.kind: {config.experience.kind} needs faiss, which is not installed: run"
            " pip install 'evolver-async[faiss]', or 'evolver-async[gpu]' for GPUs"
        )
    check_own(config)
    if config.rollout.agent_reward == "judged":
        authorization(config.judge.llm.key_env, "judge.llm.key_env")
    RewardScorer(config)  # which checks the parameters of its terms
    asks = config.questioning.kind == "llm"
    if asks and config.questioning.profile not in ("", SUMMARISED):
        load_profile(config.questioning.profile)
    check_servers(config)
    probed = set[str]()
    for index, stage, staged, source, task, env in _environments(config):
        name = task.env
        with placed(source, task):
            check_terms(staged, task)
        _check_agent(staged, name, env)
        replays = bool(task.reference)  # which leads to every state without snapshots
        _check_async(index, stage, staged, name, env, replays)
        _check_turns(staged, name, env)
        if name not in probed:
            check_threads(staged, task)
        _check_service(staged, name, env, probed)
        _check_isolation(f"stages[{index}].kind: {stage.kind}", stage, staged, name, replays)
        key = f"stages[{index}].kind: {stage.kind}"
        scripted = stage.kind == "sft" or stage.kind in BRANCHED
        if staged.env.tools.mcp and scripted and not isinstance(env, base.Tooled):
            raise ConfigError(
                f"env.tools.mcp: {key} shows actions of {name}, which are no calls of tools:"
                f" override env.tools.mcp of stages[{index}] with an empty text"
            )
        if stage.kind == "sft" and not (replays or isinstance(env, base.Solvable)):
            raise ValueError(
                f"{key} needs solve and actions, which env.name={name} has not, or a reference in"
                " every row of data.path"
            )
        if stage.kind in BRANCHED:
            _check_branches(key, stage, staged, name, env, replays)
        guided = staged.experience.kind != "none" and staged.rollout.guided_fraction > 0
        if stage.kind == "sft" and guided and not isinstance(env, base.Rewindable):
            raise ValueError(
                f"rollout.guided_fraction: {name} has no state and snapshot, without"
                f" which no demonstration of stages[{index}] can be guided: override it with 0"
            )
        if stage.kind == "rl" and staged.judge.kind == "rule" and not isinstance(env, base.Scored):
            raise ValueError(f"judge.kind: rule needs a score, which {name} has not")
        if staged.questioning.kind == "goals" and not base.makes_goals(type(env)):
            raise ValueError(
                f"questioning.kind: {name} makes no goals of its states, for which it needs goal()"
                " and a parameter `free`, an episode without goal"
            )
    _check_evaluated(config, probed)
    _check_eval_sets(
        config, probed
    )  # a set repeats what it does not change: a stage's own key comes first


def check_servers(config: Config) -> None:
    """Raise ConfigError, which names the key, for a server of tools that cannot be reached."""
    stages = (stage_config(config, index) for index in range(len(config.stages)))
    for address, key_env in dict.fromkeys(
        (one.env.tools.mcp, one.env.tools.key_env) for one in stages if one.env.tools.mcp
    ):
        tool_server(address, key_env).probe()


def check_own(config: Config) -> None:
    """Raise ValueError, naming the key, for an agent, a judge, an experience backend, a reward term
    or a turn format of the user's that cannot be imported."""
    if is_own(config.experience.kind):
        load_backend(config.experience.kind)
    rollout, judge = config.rollout, config.judge.kind
    if rollout.agent == EXTERNAL:
        start_key(rollout.endpoint.key_env)
    elif rollout.agent == USERS:
        user_keys(rollout.endpoint.key_env, rollout.serve.users_env)
    elif rollout.agent:
        load_agent(rollout.agent)
    if is_own(judge):
        implementation("judge.kind", judge, JUDGES)
    for index, term in enumerate(config.reward.terms):
        if is_own(term.name):
            load_function(f"reward.terms[{index}]", term.name)
    if is_own(rollout.format):
        implementation("rollout.format", rollout.format, FORMATS)
    extractor(rollout.extract)


def _environments(
    config: Config,
) -> Iterator[tuple[int, StageConfig, Config, TaskSource, Task, base.Env]]:
    """Yield every environment that tasks of a stage need, with the stage's own configuration; of
    rows those of a few."""
    for index, stage in enumerate(config.stages):
        staged = stage_config(config, index)
        source = source_of(staged)
        if source.learnt is not None:
            _check_form(index, stage.kind, source.learnt)
        if isinstance(source.learnt, DataTasks):
            check_examples(source.learnt, stage.kind)
        if isinstance(source.data, DataTasks):
            continue
        for task in source.examples():
            with placed(source, task):
                env = base.make_env(task.env, task.params)
            yield index, stage, staged, source, task, env


def _check_form(index: int, kind: str, data: DataTasks | GivenTasks) -> None:
    """Refuse conversations for a stage that plays, and tasks for one that does not."""
    spoken, played = isinstance(data, DataTasks), kind in BRANCHED
    if spoken and played:
        problem = "plays tasks of an environment, and these rows are conversations"
    elif not spoken and not played and kind != "sft":
        problem = "learns conversations, and these rows are tasks of an environment"
    else:
        return
    raise ConfigError(f"data.path: stages[{index}].kind: {kind} {problem}")


def _check_evaluated(config: Config, probed: set[str]) -> None:
    """Raise ValueError, naming file and row, for a row that cannot be evaluated.

    Other evaluation tasks have the environments and parameters of the training tasks, if there are
    any.
    """
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        source = source_of(staged)
        others = source.given is not None or isinstance(source.data, DataTasks)
        others = others and staged.eval.episodes > 0
        for task in source.examples(source.evaluated) if others else ():
            with placed(source, task):
                _check_played(staged, task, probed)


@contextmanager
def placed(source: TaskSource, task: Task) -> Iterator[None]:
    """Name file and row of a task that is one of a source's examples in an error about it; the
    split, if it is a numbered task for evaluations."""
    try:
        yield
    except ValueError as error:
        rows = source.rows(checked_split(task.split))
        if isinstance(rows, GivenTasks):
            key = "tasks.path" if rows is source.given else "data.path"
            raise ConfigError(f"{key}: {rows.where(task)}: {error}") from error
        if task.split == "train":
            raise
        raise ConfigError(f"eval.split: {source.evaluated}: {error}") from error


def _check_played(config: Config, task: Task, probed: set[str]) -> None:
    """Raise ValueError for a task that an evaluation cannot play."""
    env = base.make_env(task.env, task.params)
    check_terms(config, task)
    _check_agent(config, task.env, env)
    _check_turns(config, task.env, env)
    _check_service(config, task.env, env, probed)
    if config.launch.kind == "serial" and base.asynchronous(env):
        raise ValueError(f"env.name: {task.env} {SERIAL_ASYNC}")


def _check_agent(config: Config, name: str, env: base.Env) -> None:
    """Refuse an environment that needs another agent than the run has."""
    needed = env.agent if isinstance(env, base.Delegated) else ""
    if needed and config.rollout.agent != needed:
        raise ConfigError(f"rollout.agent: must be {needed} for these env.params of {name}")
    if isinstance(env, base.Delegated) and needed and config.rollout.players != [*env.players]:
        named = f"[{', '.join(env.players)}]"
        raise ConfigError(f"rollout.players: must be {named} for these env.params of {name}")


def _check_service(config: Config, name: str, env: base.Env, probed: set[str]) -> None:
    """Refuse an environment whose requirements are missing, or whose calls cannot end before the
    limit of a step: that limit would hide the failure, and the calls would go on. `probed` gets its
    name: a probe can take a second, and tells the same of all its tasks."""
    if isinstance(env, base.Limited) and env.longest_call_s >= config.env.step_timeout_s:
        limits = [one for one in ("timeout_s", "retries", "wall_s") if hasattr(env, one)]
        raise ConfigError(
            f"env.step_timeout_s: {config.env.step_timeout_s:g} s ends a call of {name}, which can"
            f" take {env.longest_call_s:.1f} s with all its attempts: raise it, or reduce"
            f" env.params.{' or env.params.'.join(limits)}"
        )
    if name not in probed:
        probe(name, env)
        probed.add(name)


def probe(name: str, env: base.Env) -> None:
    """Raise ValueError, which names the key, for a requirement that this machine does not meet."""
    if not isinstance(env, base.Probed):
        return
    try:
        env.probe()
    except ValueError:
        raise
    except RAISED as error:  # a probe of one's own, which can raise anything
        problem = f"cannot be probed: {base.one_line(error)}"
        raise base.EnvError(f"env.name: {name!r} {problem}") from error


def _check_eval_sets(config: Config, probed: set[str]) -> None:
    """Raise ValueError, naming the key, for a set of `eval.sets` that cannot be played."""
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        for name, chosen in eval_sets_of(staged).items():
            for task in chosen.examples():
                try:
                    _check_played(staged, task, probed)
                except ValueError as error:
                    raise ConfigError(of_set(name, error)) from error


def of_set(name: str, error: ValueError) -> str:
    """Return the message of an error with the key of the set of `eval.sets` that it is about."""
    joint = "." if str(error).startswith("env.") else ": "
    if name == FINAL_SET:
        return f"eval.final_episodes: the split test: {error}"
    return f"eval.sets.{name}{joint}{error}"


def _check_async(
    index: int, stage: StageConfig, staged: Config, name: str, env: base.Env, replays: bool
) -> None:
    """Refuse an async environment where calls must not wait, and async methods that are never
    awaited."""
    for part in PLAIN:
        if inspect.iscoroutinefunction(getattr(env, part, None)):
            few = f"only {', '.join(base.AWAITED)} may be async"
            raise ValueError(f"env.name: {name} has an async {part}: {few}")
    if not base.asynchronous(env):
        return
    if staged.launch.kind == "serial":
        raise ValueError(f"env.name: {name} {SERIAL_ASYNC}")
    guided = staged.experience.kind != "none" and staged.rollout.guided_fraction > 0
    if (stage.kind in BRANCHED and not replays) or (stage.kind == "sft" and guided):
        problem = f"tries its steps without waiting: make {', '.join(base.AWAITED)} plain functions"
        raise ValueError(f"env.name: {name} is async, and stages[{index}] ({stage.kind}) {problem}")


def _check_isolation(
    key: str, stage: StageConfig, staged: Config, name: str, replays: bool
) -> None:
    """Refuse stages that carry an environment's states from one to another, where these are in
    processes."""
    guided = staged.experience.kind != "none" and staged.rollout.guided_fraction > 0
    restores = (stage.kind in BRANCHED and not replays) or (stage.kind == "sft" and guided)
    isolation = base.isolation_of(name, base.env_class(name), staged.env.isolation)
    if restores and isolation == "process":
        raise ValueError(
            f"{key} restores snapshots of {name}, which an environment in a process has not: set"
            " env.isolation to thread"
        )


def _check_branches(
    key: str, stage: StageConfig, staged: Config, name: str, env: base.Env, replays: bool
) -> None:
    """Refuse branching without snapshots or actions to replay, and a reason without a place in the
    turn format."""
    if not (replays or isinstance(env, base.Rewindable)):
        raise ValueError(
            f"{key} needs solve, state and snapshot, which env.name={name} has not, or a reference"
            " in every row of data.path"
        )
    style, chosen = format_of(staged), format_name(staged)
    if style.inline or chosen == "native":
        raise ValueError(f"{key} needs turns that are messages of text, not {chosen}")
    if stage.kind == "reflect" and style.prefix not in THOUGHTFUL:
        wanted = "rollout.format=think_answer and rollout.think" if chosen == "chat" else ""
        raise ValueError(f"{key} has no place for a reason: set {wanted or 'rollout.think'}")


def _check_turns(config: Config, name: str, env: base.Env) -> None:
    """Check turn format and context by themselves and for this environment."""
    rollout, chosen = config.rollout, format_name(config)
    style = format_of(config)
    if rollout.max_tokens < style.min_tokens:
        small = f"is too small for one turn (at least {style.min_tokens})"
        raise ValueError(f"rollout.max_tokens: {rollout.max_tokens} {small}")
    if style.inline and rollout.context != "full":
        where = f"where {chosen} turns share one message"
        raise ValueError(f"rollout.context: {rollout.context} cannot be {where}")
    if not style.tools:
        if config.env.tools.mcp:
            raise ConfigError(
                f"rollout.format: {chosen} calls no tools, which env.tools.mcp gives: set auto,"
                " native or tool_call"
            )
        return
    if chosen == "native" and rollout.context != "full":
        raise ValueError(
            f"rollout.context: {rollout.context} cannot be where results stand in messages of tools"
            f" (rollout.format {chosen})"
        )
    if rollout.context == "single":
        raise ValueError(
            f"rollout.context: single would hide the question from {chosen} turns, whose"
            " observations are what a tool said"
        )
    if not isinstance(env, base.Tooled) and not config.env.tools.mcp:
        raise ValueError(f"rollout.format: {chosen} needs tools, which {name} has not")
