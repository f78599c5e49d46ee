"""Adapters against the real packages: reasoning-gym, textarena, verifiers, OpenEnv.

The last two need packages that would replace pinned ones; their tests run where those are there.
"""

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actors.adapters.reasoning_gym_env import ReasoningGym
from actors.adapters.textarena_env import TextArena
from actors.envs.base import EnvError, Limited, Probed, Solvable, make_env
from evolver_async.config.sections.rollout import EnvConfig
from evolver_async.schema import Task


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"a/{split}/{number}", env="a", split=split, map_seed=number)


@pytest.mark.process
@pytest.mark.parametrize(
    ("dataset", "kwargs"),
    [
        ("chain_sum", {"max_terms": 3}),
        ("gcd", {}),
        ("spell_backward", {}),
        ("number_sorting", {}),
        ("count_primes", {}),
    ],
)
def test_an_answer_of_the_dataset_succeeds_and_another_does_not(
    dataset: str, kwargs: dict[str, Any]
) -> None:
    env = ReasoningGym(dataset=dataset, kwargs=kwargs)
    assert isinstance(env, Solvable)
    for number in range(5):
        question = env.reset(task(number), 0)
        assert question == env.entry["question"]
        step = env.step(env.solve()[0])
        assert step.terminated and step.info.success and step.reward == 1.0
        env.reset(task(number), 0)
        wrong = env.step("none")
        assert not wrong.info.success and wrong.reward < 1.0


@pytest.mark.parametrize(
    ("dataset", "answer", "raised"),
    [("prime_factorization", "none", ValueError), ("boxnet", "[1, 2]", AttributeError)],
)
def test_a_text_that_the_dataset_cannot_read_is_worth_nothing(
    dataset: str, answer: str, raised: type[Exception]
) -> None:
    env = ReasoningGym(dataset=dataset)
    env.reset(task(), 0)
    with pytest.raises(raised):
        env.questions.score_answer(answer, env.entry)
    step = env.step(answer)
    assert step.terminated and step.reward == 0.0 and not step.info.valid


def test_a_question_belongs_to_its_task_and_to_one_split() -> None:
    env = ReasoningGym(dataset="chain_sum")
    train = [env.reset(task(n), n) for n in range(200)]
    assert train == [env.reset(task(n), 0) for n in range(200)]
    test = {env.reset(task(n, "test"), 0) for n in range(200)}
    validation = {env.reset(task(n, "validation"), 0) for n in range(200)}
    assert len(set(train)) > 190 and not set(train) & (test | validation) and not test & validation


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "dataset"),
        ({"dataset": "nothing"}, "dataset"),
        ({"dataset": "chain_sum", "kwargs": {"colour": 1}}, "kwargs"),
        ({"dataset": "chain_sum", "kwargs": {"min_terms": 5, "max_terms": 2}}, "kwargs"),
        ({"dataset": "chain_sum", "kwargs": {"seed": 1}}, "kwargs"),
        ({"dataset": "chain_sum", "success_at": 0.0}, "success_at"),
    ],
)
def test_parameters_of_reasoning_gym_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=rf"env\.params\.{named}"):
        make_env("reasoning_gym", params)


@pytest.mark.parametrize(
    ("env", "params", "module", "package"),
    [
        ("reasoning_gym", {"dataset": "gcd"}, "reasoning_gym", "reasoning-gym"),
        ("textarena", {"id": "x"}, "textarena", "textarena"),
        ("verifiers", {"taskset": "x"}, "verifiers.v1", "verifiers"),
        ("openenv", {"url": "http://x"}, "openenv.core.generic_client", "openenv"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, env: str, params: dict[str, Any], module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvError, match=rf"pip install {package}\)"):
        make_env(env, params)


def guess(env: TextArena) -> tuple[list[str], Any]:
    """Play by halves; the observations and the last step."""
    low, high, seen = 1, 20, []
    while True:
        middle = (low + high) // 2
        step = env.step(str(middle))
        seen.append(step.observation)
        if step.terminated or step.truncated:
            return seen, step
        low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)


def test_a_game_is_won_and_only_news_are_told() -> None:
    env = TextArena(id="GuessTheNumber-v0", held_out="seed")
    assert isinstance(env, Probed)
    env.probe()
    opening = env.reset(task(3), 0)
    assert "between 1 and 20" in opening
    seen, last = guess(env)
    assert last.terminated and last.info.success and last.reward == 1.0
    assert all(len(text) < 80 and "between 1 and 20" not in text for text in seen)
    told = "\n".join(seen)
    assert told.count("The target number is") == len(seen) - 1, "nothing is said twice"
    env.close()


def test_all_a_game_says_is_what_its_own_cumulative_view_holds() -> None:
    ta = pytest.importorskip("textarena")
    env = TextArena(id="GuessTheNumber-v0", held_out="seed")
    parts = [env.reset(task(5), 0)]
    secret = env.game.state.game_state["game_number"]
    guesses = [number for number in (4, 9, 17, 12) if number != secret]
    parts += [env.step(f"[{number}]").observation for number in guesses]
    whole = ta.make("GuessTheNumber-v0")
    whole.reset(num_players=1, seed=0)
    whole.env.env.game_number = whole.state.game_state["game_number"] = secret
    whole.get_observation()
    for number in guesses:
        whole.step(f"[{number}]")
        _, cumulative = whole.get_observation()
    for part in parts:
        assert part in cumulative
    game_says = [line for line in cumulative.split("\n[") if line.startswith(("GAME]", "\n[GAME]"))]
    assert len(game_says) == len(parts)


def test_a_move_that_is_refused_is_invalid_and_the_next_ends_the_game() -> None:
    env = TextArena(id="GuessTheNumber-v0", held_out="seed")
    env.reset(task(), 0)
    first = env.step("left")
    assert not first.info.valid and not first.terminated and "invalid move" in first.observation
    second = env.step("left")
    assert not second.info.valid and second.terminated and not second.info.success


def test_a_limit_of_turns_truncates_and_a_solution_terminates() -> None:
    env = TextArena(id="GuessTheNumber-v0", kwargs={"max_turns": 1}, held_out="seed")
    endings = set()
    for number in range(40):
        env.reset(task(number), 0)
        step = env.step("10")
        while not (step.terminated or step.truncated):
            step = env.step(str(env.game.state.turn))
        endings.add((step.terminated, step.truncated, step.info.success))
    assert endings == {(True, False, True), (False, True, False)}


def test_a_game_keeps_its_chance_to_itself() -> None:
    """The same way through it alone, beside seven others, and with everybody's generator moved."""

    def play(number: int, disturb: bool) -> list[str]:
        env = TextArena(id="2048-v0-super-easy")
        seen = [env.reset(task(number), number)]
        for turn in range(12):
            if disturb:
                random.random()
            seen.append(env.step(("up", "left", "down", "right")[turn % 4]).observation)
        return seen

    alone = [play(number, False) for number in range(8)]
    random.seed(5)
    state = random.getstate()
    assert [play(number, False) for number in range(8)] == alone
    assert random.getstate() == state, "the generator is put back"
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: play(n, True), range(8))) == alone
    assert len({first[0] for first in alone}) > 1


def test_starts_are_split_by_their_words_where_they_differ() -> None:
    env = TextArena(id="Secretary-v0")
    train = {env.reset(task(n), 0) for n in range(30)}
    test = {env.reset(task(n, "test"), 0) for n in range(30)}
    assert not train & test
    same = TextArena(id="GuessTheNumber-v0")
    with pytest.raises(ValueError, match="held_out"):
        same.reset(task(0, "test"), 0)
        same.reset(task(0, "train"), 0)


def test_games_that_open_alike_are_told_apart_by_their_content() -> None:
    env = TextArena(id="GuessTheNumber-v0", held_out="seed")
    begun = [(env.reset(task(n % 4), 0), env.content()) for n in range(8)]
    assert len({opening for opening, _ in begun}) == 1
    assert len({content for _, content in begun}) == 4


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "id"),
        ({"id": "Nothing-v0"}, "id"),
        ({"id": "TicTacToe-v0"}, "id"),
        ({"id": "QuantumTicTacToe-v0"}, "id"),
        ({"id": "2048-v0", "kwargs": {"colour": 1}}, "kwargs"),
    ],
)
def test_games_that_cannot_be_played_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"env\.params\.{named}"):
        env = make_env("textarena", params)
        assert isinstance(env, Probed)
        env.probe()


TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

class Config(vf.TasksetConfig):
    count: int = 40

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.count):
            yield Sum(Data(prompt=f"{i} + 1 ?", answer=str(i + 1)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def sums(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "sums_of_one.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "sums_of_one"
    sys.modules.pop("sums_of_one", None)


def test_a_task_of_verifiers_is_scored_by_its_own_rewards(sums: str) -> None:
    env = make_env("verifiers", {"taskset": sums})
    assert isinstance(env, Probed)
    env.probe()
    asked = set()
    for number in range(12):
        question = env.reset(task(number), 0)
        asked.add(question)
        answer = int(question.split()[0]) + 1
        assert env.step(str(answer)).reward == pytest.approx(1.0)
        assert env.step(str(answer)).info.success
        assert env.step("no").reward == pytest.approx(0.25)
        assert env.step("not at all").reward == 0.0
    held_out = {env.reset(task(number, "test"), 0) for number in range(12)}
    assert held_out and not asked & held_out


def test_a_taskset_can_have_a_configuration_of_its_own_for_testing(sums: str) -> None:
    params = {"taskset": sums, "kwargs": {"count": 3}, "test_kwargs": {"count": 1}}
    env = make_env("verifiers", params)
    assert {env.reset(task(n), 0) for n in range(9)} == {"0 + 1 ?", "1 + 1 ?", "2 + 1 ?"}
    assert {env.reset(task(n, "test"), 0) for n in range(9)} == {"0 + 1 ?"}
    larger = make_env("verifiers", params | {"kwargs": {"count": 40}})
    train, validation = (
        {larger.reset(task(n, split), 0) for n in range(40)} for split in ("train", "validation")
    )
    assert validation and not train & validation and len(train | validation) == 40


def test_a_taskset_that_is_not_there_or_not_so_is_named(sums: str) -> None:
    for params in ({"taskset": "no_such_set"}, {"taskset": sums, "kwargs": {"colour": 1}}):
        env = make_env("verifiers", params)
        assert isinstance(env, Probed)
        with pytest.raises(ValueError, match="taskset: cannot load"):
            env.probe()


@pytest.fixture(scope="module")
def echo_url() -> Iterator[str]:
    """A server of OpenEnv's own making, with an environment that wants its word said back."""
    pytest.importorskip("openenv.core.generic_client")
    uvicorn = pytest.importorskip("uvicorn")
    server_of = pytest.importorskip("openenv.core.env_server.http_server")
    types = pytest.importorskip("openenv.core.env_server.types")
    interfaces = pytest.importorskip("openenv.core.env_server.interfaces")

    class Say(types.Action):
        message: str

    class Heard(types.Observation):
        text: str = ""

    class Echo(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            self.word, self.said = f"word{seed}", 0
            return Heard(text=f"say {self.word}", done=False)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            self.said += 1
            if action.message == "crash":
                raise RuntimeError("the environment broke")
            if action.message == "hang":
                time.sleep(3)
            right = action.message == self.word
            return Heard(text=f"{self.said}: {action.message}", done=right, reward=float(right))

        @property
        def state(self) -> Any:
            return types.State(step_count=self.said)

    app = server_of.create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=16)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=10)


def test_an_openenv_session_is_played_to_its_end(echo_url: str) -> None:
    env = make_env("openenv", {"url": echo_url, "observation_key": "text"})
    other = make_env("openenv", {"url": echo_url, "observation_key": "text"})
    opening = env.reset(task(1), 0)
    assert other.reset(task(1), 9) == opening and other.reset(task(2), 0) != opening
    first = env.step("hello")
    assert (first.observation, first.reward, first.terminated) == ("1: hello", 0.0, False)
    last = env.step(opening.removeprefix("say "))
    assert last.observation.startswith("2: ") and last.terminated and last.info.success
    assert other.step("x").observation == "1: x", "sessions are apart"
    env.close()
    other.close()


def test_actions_of_openenv_may_be_whole_objects_and_errors_are_said(echo_url: str) -> None:
    env = make_env("openenv", {"url": echo_url, "action_key": "", "timeout_s": 1.0})
    assert '"text": "say word' in env.reset(task(1), 0)
    assert '"text": "1: hi"' in env.step('{"message": "hi"}').observation
    assert not env.step("hi").info.valid
    with pytest.raises(RuntimeError, match="the environment broke"):
        env.step('{"message": "crash"}')
    env.reset(task(1), 0)
    with pytest.raises(TimeoutError):
        env.step('{"message": "hang"}')
    env.close()


@pytest.mark.parametrize("call", ["connect", "reset", "step"])
def test_a_failure_of_openenv_names_server_and_call(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a package of our own in the place of OpenEnv's, which replaces pinned packages."""

    class Client:
        def __init__(self, url: str, **given: Any) -> None:
            assert {given["connect_timeout_s"], given["message_timeout_s"]} == {12.0}

        def sync(self) -> "Client":
            return self

        def _answer(self, name: str) -> SimpleNamespace:
            if name == call:
                raise TimeoutError("no answer")
            return SimpleNamespace(observation={"text": "seen"}, reward=0.0, done=False)

        def connect(self) -> None:
            self._answer("connect")

        def reset(self, seed: int) -> SimpleNamespace:
            return self._answer("reset")

        def step(self, sent: dict[str, Any]) -> SimpleNamespace:
            return self._answer("step")

        def close(self) -> None:
            pass

    package = ModuleType("openenv.core.generic_client")
    monkeypatch.setattr(package, "GenericEnvClient", Client, raising=False)
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    env = make_env("openenv", {"url": "http://x:1"})
    assert isinstance(env, Limited) and env.longest_call_s < EnvConfig().step_timeout_s
    with pytest.raises(TimeoutError, match=f"^http://x:1: {call}: TimeoutError: no answer"):
        env.reset(task(), 0)
        env.step("hello")
    env.close()


def test_an_openenv_server_that_is_not_there_is_a_connection_error() -> None:
    pytest.importorskip("openenv.core.generic_client")
    env = make_env("openenv", {"url": "http://127.0.0.1:9", "timeout_s": 2.0})
    with pytest.raises(ConnectionError):
        env.reset(task(), 0)
    env.close()
