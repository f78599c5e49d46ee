"""Answers to reasoning-gym: scored in the sandbox, where they run no code of their own."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy

from actors.adapters.reasoning_gym_env import INTERIOR, ReasoningGym
from actors.adapters.reasoning_gym_scorer import READY, evaluate
from actors.checks.config import check
from actors.envs.base import make_env
from actors.sandbox.interpreters import KILLED, SandboxPool
from actors.sandbox.process import Result
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.schema import Task

pytestmark = pytest.mark.process

EVALUATING = ("spiral_matrix", "string_insertion", "binary_matrix", "n_queens")
PARSING = ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration")
TASK = Task(task_id="a/train/3", env="a", split="train", map_seed=3)


def begun(dataset: str, **params: Any) -> ReasoningGym:
    env = ReasoningGym(dataset=dataset, **params)
    env.reset(TASK, 0)
    return env


@pytest.mark.parametrize("dataset", (*EVALUATING, *PARSING))
def test_an_answer_runs_no_code_and_costs_no_other(dataset: str, tmp_path: Path) -> None:
    """Neither in the actor, where it would find the file, nor in the sandbox."""
    env, owned = begun(dataset), tmp_path / "owned"
    for answer in (
        f"[open({str(owned)!r}, 'w').write('x')]",
        f"open({str(owned)!r}, 'w').write('x')",
        "__import__('os')._exit(0)",
        "().__class__.__base__.__subclasses__()",
    ):
        step = env.step(answer)
        assert step.terminated and step.reward < 0.1 and not step.info.success
    assert not owned.exists()
    assert env.step(env.solve()[0]).reward == 1.0


@pytest.mark.parametrize("dataset", ("spiral_matrix", "countdown"))
def test_an_answer_cannot_print_its_score(dataset: str) -> None:
    env = begun(dataset)
    for answer in (
        "[print('\\n1.0'), exit(0)]",
        "print('\\n1.0') or exit(0)",
        "1.0\n1.0",
        "exit(1.0)",
    ):
        assert env.step(answer).reward < 0.1


def test_an_endless_answer_holds_up_neither_the_actor_nor_the_next_answer() -> None:
    env = begun("spiral_matrix", wall_s=3.0)
    step = env.step("9**9**8")
    assert step.reward == 0.0 and not step.info.valid
    assert env.step(env.solve()[0]).info.success


@pytest.mark.parametrize(
    "answer",
    [
        "(" * 50_000,
        "[" * 200 + "]" * 200,
        "1" * 65_536,
        "x" * 100_000,
        "\ud800",
        "\0",
        "10**10**7",
        "",
    ],
)
@pytest.mark.parametrize("dataset", ("spiral_matrix", "countdown"))
def test_a_monstrous_answer_is_worth_nothing(dataset: str, answer: str) -> None:
    env = begun(dataset, wall_s=3.0)
    assert env.step(answer).reward <= 0.01
    assert env.step(env.solve()[0]).info.success


@pytest.mark.parametrize(
    ("dataset", "written"),
    [
        ("spiral_matrix", lambda answer: str([int(number) for number in answer.split()])),
        ("string_insertion", lambda answer: str(list(answer))),
    ],
)
def test_a_list_gets_what_the_dataset_gives_for_it(dataset: str, written: Any) -> None:
    env = begun(dataset)
    answer = written(env.solve()[0])
    assert env.step(answer).reward == env.questions.score_answer(answer, env.entry) == 0.1


def test_an_expression_gets_what_sympy_makes_of_it() -> None:
    env = begun("countdown")
    best = env.solve()[0]
    for answer in (
        f"({best})",
        f"sqrt(({best})**2)",
        f"Abs({best})",
        f"{best} + 0",
        "1/0",
        "x + 1",
    ):
        assert env.step(answer).reward == env.questions.score_answer(answer, env.entry)
    env = begun("simple_integration")
    for answer in (env.solve()[0], "exp(x) + sin(x)", "log(x)**2 + C", "f(x)", "E**x", "x)"):
        assert env.step(answer).reward == env.questions.score_answer(answer, env.entry)


@pytest.mark.parametrize(
    "text",
    [
        *("x", "f(1)", "().a", "[a for a in ()]", "lambda: 0", "f'{1}'", "(a := 1)", "print()"),
        *("int('1')", "[*()]", "1 if 2 else 3", "[1][0]", "await x", "x = 1", "max(1, key=print)"),
    ],
)
def test_only_literals_and_operators_are_evaluated(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        evaluate(text)
    assert evaluate(" [-1 + 2, (0x3 << 1,), {'a': 1 / 2}] ") == [1, (6,), {"a": 0.5}]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "print",
            "lambdify((), x)",
            "Function('f')",
            "Function('f', (), {})",
            "f(x)",
            "sin(print)",
        ),
        *("Symbol('print(1)')", "sin(x, evaluate=print)", "sympify('1')", "x.free_symbols", "S"),
        *("Lambda(x, x)", "Subs(x, x, 1)", "exec('1')", "sin(*[1])", "(sin)(1)(2)", "[].append"),
    ],
)
def test_sympy_gets_numbers_symbols_and_functions_alone(text: str) -> None:
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
    names |= {"print": print, "exec": exec}
    with pytest.raises(ValueError, match="is not evaluated"):
        evaluate(text, names, {"x": sympy.Symbol("x")})


def test_an_entry_with_numbers_of_numpy_is_scored() -> None:
    env = begun("knights_knaves")
    assert env.step(env.solve()[0]).reward == 1.0


def test_a_host_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ReasoningGym(dataset="gcd")
    env.probe()
    monkeypatch.setattr("actors.sandbox.interpreters.routes", lambda: ["bwrap"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=re.escape("env.name: reasoning_gym needs a sandbox")):
        env.probe()


def test_a_scorer_sees_no_variable_of_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_VALUE", "a canary")
    pool = SandboxPool(size=1, interior=INTERIOR)
    try:
        seen = pool.run("import os\nprint(dict(os.environ))")
        assert seen.status == "ok" and "canary" not in seen.stdout
    finally:
        pool.close()


def test_a_dataset_that_cannot_be_made_in_the_sandbox_is_a_failure_and_no_wrong_answer() -> None:
    env = begun("gcd")
    env.kwargs = {"colour": 1}
    with pytest.raises(RuntimeError, match=r"gcd was not scored: .*colour"):
        env.step("1")
    with pytest.raises(ValueError, match=r"env\.params\..*colour"):
        make_env("reasoning_gym", {"dataset": "gcd", "kwargs": {"colour": 1}})


def results(*given: Result) -> Any:
    """A pool whose programs end like this, one after the other."""
    left = iter(given)
    return SimpleNamespace(run=lambda source: next(left))


def test_an_answer_whose_turn_never_came_is_a_failure_and_no_score() -> None:
    env = begun("gcd")
    late = Result("", "", "timeout", 5.0)
    with pytest.raises(RuntimeError, match="gcd was not scored"):
        env._score(results(late), "1")


def test_an_answer_whose_interpreter_was_killed_is_scored_once_more() -> None:
    env = begun("gcd")
    killed, scored = Result("", KILLED, "killed", 5.0), Result(f"{READY}\n1.0\n", "", "ok", 0.1)
    assert env._score(results(killed, scored), "1") == 1.0
    assert env._score(results(killed, killed), "1") is None


def test_a_score_that_can_outlast_a_step_is_refused_before_a_start() -> None:
    keys = ["env.name=reasoning_gym", "env.params={dataset: gcd, wall_s: 25}", "stages.0.steps=1"]
    with pytest.raises(ConfigError, match=r"env\.step_timeout_s: .* reduce env\.params\.wall_s"):
        check(load(None, keys))
