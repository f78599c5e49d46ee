"""Reward and success of a finished episode, from the terms of the configuration.

    reward  = penalties of `rollout` + weight(env) · the environment's reward + Σ weight · term
    success = by `reward.success`

A term that abstains (None) is left out of the sum. In a serial run terms are computed on the loop:
its virtual clock would run past all deadlines while a thread works.
"""

import asyncio
import functools
import importlib.util
import inspect
import math
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.failure_counts import FailureCounts
from actors.llm.endpoint_client import Endpoint
from actors.rewards import answers
from actors.rewards.facts import EpisodeFacts, Unscorable, answer_of, calls, facts_of
from actors.rewards.grader import Grader
from actors.rewards.own_rewards import (
    AsyncThread,
    OwnFunction,
    arguments_of,
    load_function,
    value_of,
)
from actors.rewards.program_tests import ProgramTests, probe
from actors.rewards.served_model import ServedModel, conversation, last_tokens
from actors.rewards.workers import START_S, WorkerPool
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished, RewardTooLarge, refuse_large
from evolver_async.config import Config
from evolver_async.config.load import stage_as_written
from evolver_async.config.sections.reward import (
    OF_ANSWERS,
    REWARD_MODEL,
    RewardConfig,
    TermConfig,
)
from evolver_async.config.sections.run import PREFERENCES
from evolver_async.extension import is_own
from evolver_async.launch.run_directory import reward_model_of
from evolver_async.model.tokenizer import ModelError, same_tokenizer
from evolver_async.rewards import reaches
from evolver_async.schema import Task, TurnFlag

R = TypeVar("R")
CLASSIFIER = "actors.rewards.sequence_classifier:score"
PROMPTS = "prompts"  # the environment that shows a prompt and rewards nothing
SIMPLE: dict[str, Callable[..., float | None]] = {
    "length": lambda facts: sum(len(turn.text) for turn in facts.turns),
    "tool_calls": lambda facts: calls(facts.trajectory),
    "tokens": lambda facts: facts.trajectory.action_tokens,
    "seconds": lambda facts: facts.trajectory.timing.get("total_s", 0.0),
    "success": lambda facts: float(facts.success),
}
COMPARED = {"exact": answers.exact, "number": answers.number}
KILLABLE = {"math": answers.math, "regex": answers.regex}  # some replies take them minutes
Term = Callable[[EpisodeFacts], Awaitable[float | None]]


class RewardScorer:
    """Terms of one actor, by stage. `run_dir`: has the reward models that the run trains.

    Raises ValueError, naming the key, for a term that cannot work.
    """

    def __init__(
        self, config: Config, failures: FailureCounts | None = None, run_dir: Path | None = None
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._reward = config.reward
        self._answer = answer_column(config)
        self._agent = bool(config.rollout.agent)
        self._workers = WorkerPool(config.reward.workers)
        self._threads: ThreadPoolExecutor | None = None
        self._loop = AsyncThread()
        self._grader: Grader | None = None
        stages = [stage_as_written(config, i).reward for i in range(len(config.stages))]
        if any(reward.kind == "llm" for reward in stages):
            endpoint = Endpoint(config.reward.llm, "reward", failures)
            self._grader = Grader(endpoint, config.reward.timeout_s)
        self._models = WorkerPool(1)  # one copy of a reward model
        self._served: ServedModel | None = None
        self._configured = [reward.terms for reward in stages]
        self._terms = [
            {
                term.called: self._made(f"reward.terms[{index}]", term, stage)
                for index, term in enumerate(terms)
                if term.name != "env"
            }
            for stage, terms in enumerate(self._configured)
        ]

    async def score(
        self, task: Task, finished: Finished, setting: Setting, graded: bool, stage: int = 0
    ) -> None:
        """Set reward, success and terms of a trajectory of a stage; the turn rewards follow.

        `graded`: its reward is a grade, without penalties. Raises Unscorable, which names the term,
        and leaves the trajectory as it was.
        """
        if not (configured := self._configured[stage]):
            return
        one = finished.trajectory
        penalty_K = np.zeros(len(one.turn_rewards)) if graded else penalties(finished, setting)
        env_reward = one.reward - float(penalty_K.sum())
        facts = facts_of(task, finished, self._answer, env_reward)
        values: dict[str, float] = {}
        for name, term in self._terms[stage].items():
            value = await self._valued(name, term, facts)
            if value is not None:
                values[name] = value
        weights = {term.called: term.weight for term in configured}
        added = math.fsum(weights[name] * value for name, value in values.items())
        env = next((term for term in configured if term.name == "env"), None)
        share = 1.0 if env is None else env.weight
        turn_rewards = one.turn_rewards + ((share - 1) * (one.turn_rewards - penalty_K))
        turn_rewards[-1:] += added
        reward = one.reward + (share - 1) * env_reward + added
        try:
            refuse_large(setting.max_reward, reward, turn_rewards)
        except RewardTooLarge as error:
            raise Unscorable(f"reward.terms: {', '.join(values)} led to {error}") from None
        if env is not None:
            values[env.called] = env_reward
        elif task.env != PROMPTS:
            values["env"] = env_reward
        one.reward, one.turn_rewards = reward, turn_rewards.astype(np.float32)
        one.success = self._succeeded(task, values, reward, one.success, stage)
        one.terms = values

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        return {} if self._grader is None else self._grader.counters()

    async def close(self) -> None:
        self._workers.close()
        self._models.close()
        if self._served is not None:
            await self._served.close()
        self._loop.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._grader is not None:
            await self._grader.close()

    def _succeeded(
        self, task: Task, values: dict[str, float], reward: float, own: bool, stage: int
    ) -> bool:
        """Return the success of an episode; False if the term that decides abstains."""
        rule, threshold = self._reward.success, self._reward.threshold
        if rule == "auto":
            measured = task.env == PROMPTS and not self._agent
            first = RewardConfig(self._configured[stage]).first
            rule = first if measured and first else "env"
        if rule == "env":
            return own
        value = reward if rule == "total" else values.get(rule)
        return value is not None and reaches(value, threshold)

    async def _valued(self, name: str, term: Term, facts: EpisodeFacts) -> float | None:
        try:
            value = await term(facts)
        except Unscorable as error:
            raise Unscorable(f"reward.terms: {name} {error}") from None
        if value is not None and not math.isfinite(value):
            raise Unscorable(f"reward.terms: {name} is {value}, which is no finite number")
        return value

    def _made(self, key: str, term: TermConfig, stage: int) -> Term:
        """Return a term as a coroutine function."""
        name, params = term.name, term.params
        if is_own(name):
            own = load_function(key, name)
            return functools.partial(self._own, own, params)
        if name == REWARD_MODEL:
            if params:
                raise ValueError(f"{key}.params: {name} takes none: see reward.model")
            return self._by_model(stage)
        try:
            return self._built_in(name, params)
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"{key}.params: {name}: {error}") from None

    def _built_in(self, name: str, params: dict[str, Any]) -> Term:
        if name == "code":
            tests = ProgramTests(**params)
            tests.pool()
            return lambda facts: self._blocking(tests.passed, facts)
        if name == "llm":
            assert self._grader is not None, "the endpoint of a term llm was made"
            inspect.signature(self._grader.grade).bind(None, **params)
            return functools.partial(self._grader.grade, **params)
        if name in SIMPLE:
            inspect.signature(SIMPLE[name]).bind(None, **params)
            return functools.partial(_simple, SIMPLE[name])
        function = (COMPARED | KILLABLE)[name]
        texts = ("",) if name == "regex" else ("", "")
        inspect.signature(function).bind(*texts, **params)
        if name == "regex":
            re.compile(params["pattern"])
        return functools.partial(self._compared, name, function, params)

    def _by_model(self, stage: int) -> Term:
        """Return the term of a reward model: a served one, a directory, or the run's own."""
        model, limit = self._reward.model, self._reward.timeout_s
        if model.url:
            self._served = self._served or ServedModel(model, limit)
            return self._served.score
        directory = Path(model.path)
        if not model.path:
            directory = own_model(self._config, stage, self._run_dir or Path())
        reads_tokens: bool | None = None

        async def term(facts: EpisodeFacts) -> float | None:
            nonlocal reads_tokens
            given: dict[str, Any] = {"directory": str(directory)}
            if reads_tokens is None:  # the first call loads the model, beside its time
                try:
                    alike = same_tokenizer(directory, self._config.policy.path)
                except ModelError as error:
                    raise Unscorable(f"found no model: {error}") from None
                call = self._models.call, CLASSIFIER, given | {"tokens": [0]}, {}, START_S
                await self._blocking(*call)
                reads_tokens = alike
            key, read = ("tokens", last_tokens) if reads_tokens else ("messages", conversation)
            call = self._models.call, CLASSIFIER, given | {key: read(facts)}, {}, limit
            value, _ = await self._blocking(*call)
            return value

        return term

    async def _compared(
        self, name: str, function: Callable[..., float], params: dict[str, Any], facts: EpisodeFacts
    ) -> float | None:
        arguments: dict[str, Any] = {"text": facts.text}
        if name != "regex":
            answer = facts.needed_answer()
            if answer is None:
                return None
            arguments = {"reply": facts.reply, "answer": answer}
        if name in COMPARED:
            return function(**arguments, **params)
        path, limit = f"{answers.__name__}:{name}", self._reward.timeout_s
        value, _ = await self._blocking(self._workers.call, path, arguments | params, {}, limit)
        return value

    async def _own(
        self, own: OwnFunction, params: dict[str, Any], facts: EpisodeFacts
    ) -> float | None:
        arguments, steps = arguments_of(own, facts, params)
        limit = self._reward.timeout_s
        if own.asynchronous:
            returned, metrics = await self._loop.call(own, arguments, steps, limit)
        else:
            call = self._workers.call, own.path, arguments, steps, limit
            returned, metrics = await self._blocking(*call)
        facts.trajectory.metrics = {**facts.trajectory.metrics, **metrics}
        return value_of(returned)

    async def _blocking(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function that blocks for a bounded time, in a thread unless the clock is virtual.

        There are as many threads as processes, so that none of them waits for one.
        """
        loop = asyncio.get_running_loop()
        if getattr(loop, "virtual", False):
            return function(*arguments)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._reward.workers, "rewards")
        return await loop.run_in_executor(self._threads, function, *arguments)


async def _simple(function: Callable[[EpisodeFacts], float | None], facts: EpisodeFacts) -> Any:
    return function(facts)


def own_model(config: Config, stage: int, run_dir: Path) -> Path:
    """Return the directory of the reward model that the run has trained before a stage."""
    kinds = [one.kind for one in config.stages[:stage]]
    newest = max((n for n, kind in enumerate(kinds) if kind == REWARD_MODEL), default=0)
    return reward_model_of(run_dir, newest)


def scores(config: Config) -> bool:
    """Return True if some stage has terms."""
    return any(stage_as_written(config, i).reward.terms for i in range(len(config.stages)))


def answer_column(config: Config) -> str:
    """Return the column of a row that holds its answer."""
    return config.tasks.answer or "answer"


def penalties(finished: Finished, setting: Setting) -> np.ndarray:
    """Return what `rollout` has added to each turn's reward, float64[K]."""
    one = finished.trajectory
    bad_K = (one.turn_flags & (TurnFlag.FORMAT_ERROR | TurnFlag.INVALID_ACTION)) != 0
    penalty_K = setting.format_penalty * bad_K
    if not one.terminated:
        penalty_K[-1:] += setting.truncated_reward
    return penalty_K


def check_terms(config: Config, task: Task) -> None:
    """Raise ValueError, naming the key, for a term that cannot score episodes of a task."""
    reward, column = config.reward, answer_column(config)
    trains = any(stage.kind in ("rl", *PREFERENCES) for stage in config.stages)
    if task.env == PROMPTS and trains and not (reward.terms or config.rollout.agent):
        raise ValueError(f"reward.terms: env.name={PROMPTS} has no reward of its own: name a term")
    known = f"has {', '.join(task.row)}" if task.row else "its tasks have no rows"
    for index, term in enumerate(reward.terms):
        key = f"reward.terms[{index}]"
        if is_own(term.name):
            own = load_function(key, term.name)
            if missing := own.missing(task.row, term.params):
                raise ValueError(f"{key}: {term.name} needs {missing[0]!r}, and {task.env} {known}")
            if own.asynchronous and config.launch.kind == "serial":
                raise ValueError(
                    f"{key}: {term.name} is async: launch.kind=serial has no real time"
                )
        elif term.name == "math" and importlib.util.find_spec("math_verify") is None:
            problem = "math needs math-verify: pip install 'evolver-async[math]'"
            raise ValueError(f"{key}: {problem}")
        elif term.name in OF_ANSWERS[:3] and answer_of(task, column) is None:
            raise ValueError(
                f"{key}: {term.name} needs an answer (tasks.answer, or a reference):"
                f" {task.env} {known}"
            )
        elif term.name == "code":
            tests = ProgramTests(**term.params)
            if tests.tests not in task.row:
                raise ValueError(
                    f"{key}.params.tests: no column {tests.tests!r}: {task.env} {known}"
                )
            probe(tests.packages)
