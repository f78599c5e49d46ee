"""The code environment: questions, programs that are run for them, and what counts as right."""

import json
import re
from typing import Any

import pytest
from budget import examples
from demonstrations import demonstrated
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import TOKENIZER, setting, ticket

from actors.checks.config import check
from actors.envs.base import EnvError, Probed, Rewindable, Solvable, Tooled, make_env
from actors.envs.code.arithmetic import draw_product
from actors.envs.code.code_env import TOOL, Code
from actors.envs.code.problems import Problem, number, same
from actors.envs.code.programs import RESULTS, STEPS, draw_program
from actors.formats.tool_calls import Interleaved, ToolCall, canonical
from evolver_async.config.load import load
from evolver_async.schema import Role, Task, TurnFlag
from evolver_async.splits import SPLITS

pytestmark = pytest.mark.process


def task(map_seed: int = 0, split: str = "train", reference: list[str] | None = None) -> Task:
    task_id = f"code/{split}/{map_seed}"
    return Task(task_id=task_id, env="code", split=split, map_seed=map_seed, reference=reference)


def begun(map_seed: int = 0, split: str = "train", seed: int = 0, **params: Any) -> Code:
    env = Code(**params)
    env.reset(task(map_seed, split), seed)
    return env


def python(code: str) -> str:
    return canonical("python", {"code": code})


def answer(text: str) -> str:
    return canonical("answer", {"text": text})


def test_it_is_what_recipes_need() -> None:
    env = make_env("code", {"kind": "arithmetic"})
    for protocol in (Solvable, Rewindable, Tooled, Probed):
        assert isinstance(env, protocol)
    assert isinstance(env, Code) and env.tools() == [TOOL] and env.isolation == "thread"
    json.dumps(env.tools())
    env.probe()


@pytest.mark.parametrize("split", ["train", "test"])
def test_products_are_what_the_question_says(split: str) -> None:
    for map_seed in range(200):
        problem = draw_product(split, map_seed)
        found = re.fullmatch(r"(\d\d) \* (\d\d) % 1000 = \?", problem.question)
        assert found is not None
        right = str(int(found[1]) * int(found[2]) % 1000)
        assert problem.answer == problem.solution == right
        assert right not in problem.wrong and len(set(problem.wrong)) == len(problem.wrong)


@pytest.mark.parametrize("draw", [draw_product, draw_program])
def test_splits_share_no_question(draw: Any) -> None:
    drawn = [
        {
            draw(split, n).solution if draw is draw_program else draw(split, n).program
            for n in range(300)
        }
        for split in SPLITS
    ]
    assert sum(map(len, drawn)) == len(set().union(*drawn)) and min(map(len, drawn)) > 100
    if draw is draw_product:  # neither in the other order
        pairs = [{frozenset(re.findall(r"\d\d", code)[:2]) for code in s} for s in drawn]
        assert sum(map(len, pairs)) == len(set().union(*pairs))
    assert draw("train", 3) == draw("train", 3) != draw("train", 4)


@pytest.mark.parametrize("kind", ["arithmetic", "programs"])
@pytest.mark.parametrize("map_seed", range(6))
def test_the_expert_runs_a_program_and_is_right(kind: str, map_seed: int) -> None:
    env = begun(map_seed, kind=kind, wrong=-1.0)
    (first,) = env.solve()
    ran = env.step(first)
    assert not (ran.terminated or ran.truncated or ran.info.tool_error) and ran.reward == 0
    assert ran.info.valid and ran.observation
    if kind == "arithmetic":
        assert ran.observation == env.problem.answer
    else:  # what the question shows of it
        assert f"= {ran.observation}" in env.problem.question
    (second,) = env.solve()
    done = env.step(second)
    assert done.terminated and done.info.success and done.reward == 1.0


@pytest.mark.parametrize("kind", ["arithmetic", "programs"])
def test_wrong_answers_are_wrong_and_broken_programs_break(kind: str) -> None:
    for map_seed in range(4):
        env = begun(map_seed, kind=kind, wrong=-1.0)
        for wrong in env.problem.wrong[:3]:
            done = env.step(answer(wrong))
            assert (done.reward, done.terminated, done.info.success) == (-1.0, True, False)
        for code in env.problem.broken:
            ran = env.step(python(code))
            assert ran.info.tool_error and ran.info.valid and not ran.terminated
            assert ran.observation.startswith("error: "), (code, ran.observation)


def test_a_hundred_programs_are_right_in_one_run_each() -> None:
    """The functions that give the expected results against the code that is said to be right."""
    pool = Code(wall_s=20)._pool()
    used = set()
    for map_seed in range(100):
        problem = draw_program("train", map_seed)
        used |= {part.words for part in (*STEPS, *RESULTS) if part.code in problem.solution}
        ran = pool.run(problem.examination(problem.solution))
        assert problem.passed(ran.stdout), (problem.solution, ran)
        ran = pool.run(problem.examination(problem.wrong[0]))
        assert not problem.passed(ran.stdout)


def test_a_random_player_guesses_and_errs_as_often_as_asked() -> None:
    for guess, broken in ((0.7, 0.4), (0.0, 1.0), (1.0, 0.0), (0.5, 0.0)):
        env = begun(guess=guess, broken=broken)
        actions = [json.loads(action) for action in env.actions()]
        guesses = [a["arguments"]["text"] for a in actions if a["name"] == "answer"]
        codes = [a["arguments"]["code"] for a in actions if a["name"] == "python"]
        assert len(guesses) == round(20 * guess) and len(actions) == 20
        assert env.problem.answer not in guesses
        bad = [code for code in codes if code != env.problem.program]
        assert len(bad) == round((20 - len(guesses)) * broken)
        assert env.actions() == env.actions()
    env = begun(guess=1.0)
    env.step(python("1/0"))
    assert {json.loads(action)["name"] for action in env.actions()} == {"python"}
    env.step(python(env.problem.program))
    assert env.actions() == [answer(env.problem.answer)] == env.solve()


def test_a_snapshot_takes_back_what_was_run() -> None:
    env = begun()
    start, before = env.snapshot(), env.state()
    assert before == env.problem.question
    env.step(python("print(7)"))
    assert env.state() == "7"
    env.restore(start)
    assert env.state() == before and env.snapshot() == start
    assert json.loads(env.solve()[0])["name"] == "python"


# ---- in episodes


@pytest.mark.parametrize("style", [Interleaved, ToolCall])
@pytest.mark.parametrize("kind", ["arithmetic", "programs"])
def test_an_experts_episode_is_right_in_every_format_with_tools(style: Any, kind: str) -> None:
    asked = ticket({"kind": kind}, members=2, env="code", group_id=7, max_tokens=200)
    how = setting(format=style(think=False, actions_per_turn=1))
    for trajectory in demonstrated(asked, how, 1.0):
        assert trajectory.success and trajectory.terminated and trajectory.reward == 1.0
        assert trajectory.turn_flags.tolist() == [TurnFlag.TOOL_CALL, 0]
        (sequence,) = trajectory.sequences
        seen = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.OBSERVATION].tolist())
        written = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.ACTION].tolist())
        problem = (draw_product if kind == "arithmetic" else draw_program)("train", 7)
        assert "print(" in written and "print(" not in seen
        assert (problem.answer if kind == "arithmetic" else "") in seen


def test_random_episodes_succeed_as_often_as_they_use_the_tool_and_their_errors_are_flagged() -> (
    None
):
    how = setting(format=Interleaved(think=False, actions_per_turn=1))
    done = [
        trajectory
        for group_id in range(12)
        for trajectory in demonstrated(ticket({}, 8, group_id, "code", 200), how, 0.0)
    ]
    tooled = [trajectory for trajectory in done if len(trajectory.turn_flags) > 1]
    assert {trajectory.success for trajectory in tooled} == {True}
    assert not any(t.success for t in done if len(t.turn_flags) == 1)
    assert 0.15 < len(tooled) / len(done) < 0.45  # 0.3 of 96: 0.047 is one standard deviation
    flags = [flag for trajectory in tooled for flag in trajectory.turn_flags[:-1]]
    assert set(flags) == {TurnFlag.TOOL_CALL, TurnFlag.TOOL_CALL | TurnFlag.TOOL_ERROR}
    assert 0.15 < sum(bool(flag & TurnFlag.TOOL_ERROR) for flag in flags) / len(flags) < 0.65


# ---- bad input


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ('{"name": "python", "arguments"', "error: this is no call as JSON"),
        ('{"name": "browser", "arguments": {}}', "error: no tool 'browser' (known: python)"),
        ('{"name": "python", "arguments": {}}', "error: python takes 'code', a string"),
        ('{"name": "python", "arguments": {"code": 3}}', "error: python takes 'code'"),
        ('{"name": "python", "arguments": {"code": "1", "x": 2}}', "error: python takes 'code'"),
        ('{"name": "answer", "arguments": {"code": "1"}}', "error: answer takes 'text'"),
    ],
)
def test_a_call_that_is_none_is_told_and_changes_nothing(action: str, said: str) -> None:
    env = begun()
    before = env.snapshot()
    step = env.step(action)
    assert step.observation.startswith(said) and env.snapshot() == before
    assert step == step._replace(reward=0.0, terminated=False, truncated=False)
    assert step.info.tool_error and not step.info.valid and not step.info.success


@pytest.mark.parametrize(
    ("code", "observation", "error"),
    [
        ("print(1)\nprint(2)", "1\n2", False),
        ("x = 1", "no output", False),
        ("print(1)\n1/0", "1\nerror: ZeroDivisionError: division by zero", True),
        ("print(", "error: SyntaxError: '(' was never closed", True),
        ("exit(1)", "error: NameError: name 'exit' is not defined", True),
        ("while True: pass", "error: no end within 0.3 s", True),
        ("while True: print('x' * 9999)", "xxx ...\nerror: more than 65536 bytes of output", True),
        ("import os\nos.kill(os.getpid(), 9)", "error: the program was killed", True),
        ("print('x' * 100)", "xxx ...", False),
    ],
)
def test_what_a_program_said_is_observed(code: str, observation: str, error: bool) -> None:
    shown = 3 if "x'" in code else 400
    wall_s = 0.3 if code == "while True: pass" else 10.0
    step = begun(wall_s=wall_s, shown_chars=shown).step(python(code))
    assert (step.observation, step.info.tool_error) == (observation, error)
    assert step.info.valid and not step.terminated


def test_tools_are_called_in_any_case_and_texts_are_answers() -> None:
    env = begun()
    assert env.step('{"name": "Python", "arguments": {"code": "print(3)"}}').observation == "3"
    done = env.step(f" {env.problem.answer} ")
    assert done.terminated and done.info.success


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys\nprint('[]')\nsys.exit()",
        "import os\nprint('[\"1\"]')\nos._exit(0)",
        "def f(x):\n    return __answers",
        "class Anything:\n    def __eq__(self, other): return True\ndef f(x): return Anything()",
        "import json\njson.dumps = lambda value: 'true'\ndef f(x): return 1",
        "def f(x): raise SystemExit",
        "f = 3",
        "",
        "\x00",
        "while True: pass",
    ],
)
def test_hidden_tests_cannot_be_talked_into_passing(cheat: str) -> None:
    env = begun(kind="programs", wall_s=0.5)
    done = env.step(answer(cheat))
    assert done.terminated and not done.info.success and done.reward == 0.0


def test_a_program_without_a_free_interpreter_is_a_tool_error_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.sandbox.interpreters.WAIT_S", 0.1)
    env = begun(kind="programs", workers=1, wall_s=9.0)
    interpreters = env._pool()._free
    taken = interpreters.get()
    step = env.step(python("print(1)"))
    assert step.observation == "error: no interpreter was free within 0.1 s"
    assert step.info.tool_error and step.info.valid and not step.terminated
    with pytest.raises(RuntimeError, match="hidden tests were not run: no interpreter was free"):
        env.step(answer(env.problem.solution))
    interpreters.put(taken)
    assert env.step(python("print(1)")).observation == "1"
    assert env.step(answer(env.problem.solution)).reward == 1.0


def test_a_program_that_can_outlast_a_step_is_refused_before_a_start() -> None:
    keys = ["env.name=code", "rollout.format=tool_call", "stages.0.steps=1"]
    check(load(None, [*keys, "env.params={wall_s: 18}"]))
    with pytest.raises(ValueError, match=r"env\.step_timeout_s: .* reduce env\.params\.wall_s"):
        check(load(None, [*keys, "env.params={wall_s: 19}"]))


def test_a_program_in_a_fence_is_the_program() -> None:
    env = begun(kind="programs")
    assert env.step(answer(f"```python\n{env.problem.solution}\n```")).reward == 1.0


def test_hidden_results_never_enter_the_sandbox() -> None:
    problem = Problem(question="q", tests=(([[1, 2]], 987654321), ([[3]], "secret")))
    text = problem.examination("def f(x): return 1")
    assert "987654321" not in text and "secret" not in text and "[[1, 2]]" in text


def test_results_are_compared_strictly() -> None:
    problem = Problem(question="q", tests=(([1], 1), ([2], [1, 2])))
    assert problem.passed('noise\n["1", "[1, 2]"]\n')
    for said in ('["true", "[1, 2]"]', '["1.0", "[1, 2]"]', '["1"]', "", '["1", null]', "[1,"):
        assert not problem.passed(said)


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        *(("938", "938", True), (" 0938 ", "938", True), ("938.0", "938", True)),
        *(("1,938", "1938", True), ("$5", "5", True), ("1/2", "0.5", True), ("-0.5", "-1/2", True)),
        *(("939", "938", False), ("9e2", "900", False), ("1/0", "1/0", True), ("1/0", "0", False)),
        *(("Paris ", "paris", True), ("paris  france", "Paris France", True), ("", "0", False)),
        *(("1" * 100, "1", False), ("1e999999999", "1", False), ("nan", "1", False)),
        *(("-1.5", "-1.5", True), ("-0.5", "0.5", False), ("1,2", "12", False)),
        *((".5", "0.5", True), ("5.", "5", True), ("-.5", "-1/2", True), (".5", "5", False)),
        *((".", "0", False), ("-", "0", False), ("-.", "0", False), ("/2", "0", False)),
    ],
)
def test_answers_are_compared_as_numbers_where_they_are(
    text: str, right: str, expected: bool
) -> None:
    assert same(text, right) is expected


@settings(max_examples=examples(200))
@given(st.text(max_size=60))
def test_any_text_is_a_number_or_not(text: str) -> None:
    value = number(text)
    assert value is None or same(text, str(value))


def test_given_questions() -> None:
    program, last = python("print(6*7)"), answer("42")
    env = Code(kind="given", question="what is 6 times 7 ?", answer="42", wrong=-1.0)
    assert env.reset(task(reference=[program, last]), 0) == "what is 6 times 7 ?"
    assert env.solve() == [program, last]
    assert env.step(program).observation == "42" and env.solve() == [last]
    assert env.step(last).info.success and env.step(answer("41")).reward == -1.0
    with pytest.raises(ValueError, match="no actions to choose from"):
        env.actions()
    env.reset(task(), 0)
    with pytest.raises(ValueError, match="reference alone"):
        env.solve()
    params = {"kind": "given", "question": "double it", "tests": [[[2], 4], [["a"], "aa"]]}
    tested = make_env("code", params)
    tested.reset(task(), 0)
    assert tested.step(answer("def f(x): return x * 2")).info.success
    assert not tested.step(answer("def f(x): return x + x if x == 2 else x")).info.success


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"kind": "given"}, r"env\.params\.question: belongs to kind given"),
        ({"question": "q"}, r"env\.params\.question: belongs to kind given"),
        ({"kind": "given", "question": "q"}, r"env\.params\.answer: .* either an answer or tests"),
        ({"kind": "poetry"}, r"env\.params\.kind: "),
        ({"guess": 1.5}, r"env\.params\.guess: 1\.5 is not in 0\.\.1"),
        ({"broken": -1}, r"env\.params\.broken: -1\.0 is not in"),
        ({"wrong": 1.0}, r"env\.params\.wrong: 1\.0 is not less"),
        ({"wall_s": 0}, r"env\.params\.wall_s: 0"),
        ({"memory_mb": 1}, r"env\.params\.memory_mb: 1 is less"),
        ({"workers": 0}, r"env\.params\.workers: 0"),
        ({"shown_chars": 0}, r"env\.params\.shown_chars: 0"),
    ],
)
def test_parameters_are_refused_by_name(params: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvError, match=said):
        make_env("code", params)


RECIPE = ["env.name=code", "rollout.format=interleaved", "rollout.actions_per_turn=1"]
RECIPE += ["rollout.think=false", "stages=[{steps: 1}]"]


def test_a_machine_without_a_sandbox_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(load(None, RECIPE))
    monkeypatch.setattr("actors.sandbox.interpreters.routes", lambda: ["bwrap"])
    monkeypatch.setattr("actors.sandbox.process.shutil.which", lambda name: "/nowhere/bwrap")
    with pytest.raises(ValueError, match=r"env\.name: code needs a sandbox: .*bubblewrap"):
        check(load(None, RECIPE))
