"""Terms of the reward: values, weights, abstention, success, and functions that misbehave."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episodes import episode
from http_server import HttpServer, Reply, raw
from openai_server import OpenAIServer, answer, closed_url, status
from rollouts import setting
from transformers import AutoModelForSequenceClassification

from actors.rewards.facts import Unscorable, facts_of
from actors.rewards.own_rewards import arguments_of, load_function
from actors.rewards.scorer import RewardScorer, check_terms
from actors.rollout.finished import Finished
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load
from evolver_async.launch.serial import VirtualLoop
from evolver_async.model.tiny import make_tiny
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import Role, Sequence, Task, Trajectory, TurnFlag, VersionRun, WeightId
from evolver_async.wire.transcripts import Transcript, Turn

ROW = {"question": "What is 72 + 25?", "answer": "97", "level": "hard", "prompt": "dropped"}
PROMPT = [{"role": "user", "content": "What is 72 + 25?"}]


def task(**facts: Any) -> Task:
    given: dict[str, Any] = {"env": "prompts", "prompt": PROMPT, "row": ROW}
    return Task(task_id="t", split="train", map_seed=0, **(given | facts))


def played(*texts: str, reward: float = 0.0, success: bool = False, **facts: Any) -> Finished:
    """An episode with a turn for each text, the last of which earned the reward."""
    weights, count = WeightId(lineage=1, step=7), len(texts)
    sequence = Sequence(
        tokens=np.array([1, 2, 3, 4], np.int32),
        roles=np.array([Role.PROMPT, Role.ACTION, Role.ACTION, Role.ACTION], np.uint8),
        turns=np.array([-1, 0, 0, 0], np.int16),
        logprobs=np.array([0, -1, -1, -1], np.float32),
        versions=[VersionRun(weights=weights, tokens=3)],
    )
    turn_rewards = np.zeros(count, np.float32)
    turn_rewards[-1:] = reward
    given: dict[str, Any] = {
        "reward": reward,
        "success": success,
        "terminated": True,
        "truncated": False,
        "turn_rewards": turn_rewards,
        "turn_flags": np.zeros(count, np.uint8),
        "labels": np.zeros(count, np.int8),
    }
    one = episode(sequence, **(given | facts))
    turns = [Turn(observation=f"seen {k}", state="", action=x, text=x) for k, x in enumerate(texts)]
    transcript = Transcript(
        trajectory_id="0/0/0", reward=reward, success=success, experience_ids=[], turns=turns
    )
    return Finished(one, transcript, "the query", "", "", [], [], [])


def config(*arguments: str, serial: bool = False) -> Config:
    kind = ["launch.kind=serial"] if serial else []
    return load(None, ["stages.0.steps=1", *kind, *arguments])


def score(
    finished: Finished, *arguments: str, of: Task | None = None, virtual: bool = False
) -> Trajectory:
    """Score an episode, in real time or on the loop of a serial run."""

    async def scored() -> None:
        scorer = RewardScorer(config(*arguments))
        try:
            await scorer.score(of or task(), finished, setting(), graded=False)
        finally:
            await scorer.close()

    if virtual:
        loop = VirtualLoop()
        loop.run_until_complete(scored())
        loop.close()
    else:
        asyncio.run(scored())
    return finished.trajectory


def test_every_built_in_term_has_its_value() -> None:
    flags = np.array([TurnFlag.TOOL_CALL, 0], np.uint8)
    finished = played("let me see", "97", turn_flags=flags, timing={"total_s": 2.5})
    one = score(finished, "reward=[exact, number, length, tool_calls, tokens, seconds, success]")
    assert one.terms == {
        "exact": 1.0,
        "number": 1.0,
        "length": 12.0,
        "tool_calls": 1.0,
        "tokens": 3.0,
        "seconds": 2.5,
        "success": 0.0,
    }
    assert one.reward == pytest.approx(sum(one.terms.values()))


@pytest.mark.process
@pytest.mark.parametrize("virtual", [False, True])
def test_killable_terms_work_in_real_time_and_in_a_serial_run(virtual: bool) -> None:
    arguments = "reward=[math, {name: regex, params: {pattern: '9.'}, weight: 0.5}]"
    one = score(played("it is $97$"), arguments, virtual=virtual)
    assert (one.terms, one.reward) == ({"math": 1.0, "regex": 1.0}, 1.5)


@pytest.mark.process
def test_a_pattern_that_never_ends_is_killed() -> None:
    pattern = "{name: regex, params: {pattern: '(a+)+$'}}"
    with pytest.raises(Unscorable, match=r"^reward\.terms: regex did not return within 0\.5 s$"):
        score(played("a" * 60 + "b"), f"reward.terms=[{pattern}]", "reward.timeout_s=0.5")


@pytest.mark.process
@pytest.mark.parametrize(
    ("tests", "reply", "value"),
    [
        (
            ["assert f(2) == 4", "assert f(3) == 9"],
            "```python\ndef f(x):\n    return x * x\n```",
            1,
        ),
        (["assert f(2) == 4"], "def f(x): return x", 0),
        (["assert f(2) == 4"], "import sys\nsys.exit(0)", 0),
        ("assert f(2) == 4", "def f(x): return x * x", 1),
        ([[[2], 4], [[3], 9]], "Here:\n```\ndef f(x):\n    return x * x\n```\nDone.", 1),
        ([[[2], 4], [[3], 8]], "def f(x): return x * x", 0),
    ],
)
def test_a_rows_tests_run_in_the_sandbox(tests: Any, reply: str, value: float) -> None:
    assert (
        score(played(reply), "reward=[code]", of=task(row={"tests": tests})).terms["code"] == value
    )


def test_a_row_without_tests_or_answer_abstains() -> None:
    one = score(played("97"), "reward=[code, exact, tokens]", of=task(row={"tests": []}))
    assert one.terms == {"tokens": 3.0} and one.reward == 3.0


def test_weights_and_penalties_make_the_reward() -> None:
    """R = α · success - β · cost - γ · risk, and the penalty of a turn that could not be read."""
    terms = "[{name: success, weight: 2}, {name: tool_calls, weight: -0.1}, {name: env, weight: 0}]"
    flags = np.array([TurnFlag.FORMAT_ERROR | TurnFlag.TOOL_CALL, TurnFlag.TOOL_CALL], np.uint8)
    turn_rewards = np.array([-0.1, 5.0], np.float32)
    finished = played(
        "a", "b", reward=4.9, success=True, turn_flags=flags, turn_rewards=turn_rewards
    )
    one = score(finished, f"reward.terms={terms}", of=task(env="frozen_lake"))
    assert one.terms == {"success": 1.0, "tool_calls": 2.0, "env": pytest.approx(5.0)}
    assert one.reward == pytest.approx(2.0 - 0.2 - 0.1)
    assert one.turn_rewards.tolist() == pytest.approx([-0.1, 1.8])


def test_the_environments_reward_counts_unless_it_has_a_weight_of_its_own() -> None:
    world = task(env="frozen_lake", row={}, prompt=[], reference=["97"])
    assert score(played("97", reward=3.0), "reward=[exact]", of=world).reward == 4.0
    half = "reward=[exact, {name: env, weight: 0.5}]"
    one = score(played("97", reward=3.0), half, of=world)
    assert (one.reward, one.terms) == (2.5, {"exact": 1.0, "env": 3.0})


@pytest.mark.parametrize(
    ("text", "reply", "value"),
    [
        ("97", "97", 1.0),
        ("<think>98</think>97", "<think>98</think>97", 1.0),
        ('{"name": "answer", "arguments": {"text": "97"}}', "x", 1.0),
        ("98", "x", 0.0),
    ],
)
def test_the_reply_is_the_answer_in_the_last_action(text: str, reply: str, value: float) -> None:
    assert score(played(text), "reward=[exact]").terms["exact"] == value


def test_an_unreadable_turn_has_no_reply() -> None:
    flags = np.array([TurnFlag.FORMAT_ERROR], np.uint8)
    assert score(played("97", turn_flags=flags), "reward=[exact]").terms["exact"] == 0.0


SUCCESSES = [
    ("[exact]", "auto", 1.0, True),  # of prompts: the first term
    ("[tokens, exact]", "auto", 1.0, True),  # that measures the answer
    ("[{name: number, label: right, weight: 0.3}]", "auto", 1.0, True),  # whatever its weight
    ("[exact]", "env", 1.0, False),
    ("[exact, tokens]", "total", 4.0, True),
    ("[exact, tokens]", "total", 4.1, False),
    ("[exact, tokens]", "tokens", 3.0, True),
    ("[exact, tokens]", "tokens", 3.1, False),
    ("[{name: regex, params: {pattern: x}}, exact]", "exact", 1.0, True),
]


@pytest.mark.process
@pytest.mark.parametrize(("terms", "rule", "threshold", "success"), SUCCESSES)
def test_success_is_a_term_or_a_threshold(
    terms: str, rule: str, threshold: float, success: bool
) -> None:
    changes = f"reward.success={rule}", f"reward.threshold={threshold}"
    assert score(played("97"), f"reward.terms={terms}", *changes).success == success


@pytest.mark.parametrize("own", [True, False])
def test_another_environments_success_is_its_own(own: bool) -> None:
    world = task(env="frozen_lake")
    assert score(played("97", success=own), "reward=[exact]", of=world).success == own


def test_a_threshold_is_reached_within_rounding() -> None:
    terms = "[{name: exact, weight: 0.1}, {name: number, weight: 0.2}]"
    changes = "reward.success=total", "reward.threshold=0.30000000000000001"
    assert score(played("97"), f"reward.terms={terms}", *changes).success


@pytest.mark.process
@pytest.mark.parametrize("virtual", [False, True])
def test_a_function_with_trls_signature_is_a_term(virtual: bool) -> None:
    one = score(played("it is 97"), "reward=[own_rewards:correct]", virtual=virtual)
    assert (one.terms, one.reward, one.success) == ({"correct": 1.0}, 1.0, True)


def test_an_async_function_is_a_term() -> None:
    one = score(played("97"), "reward=[own_rewards:slowly]", of=task(row={"level": 0.25}))
    assert one.terms == {"slowly": 0.25}


@pytest.mark.process
def test_a_term_that_abstains_is_left_out_and_is_no_success() -> None:
    terms = "reward=[own_rewards:if_easy, {name: tokens, weight: 0.1}]"
    one = score(played("97"), terms)
    assert (one.terms, one.success) == ({"tokens": 3.0}, False)
    assert one.reward == pytest.approx(0.3)
    assert score(played("97"), terms, of=task(row={"level": "easy"})).success


@pytest.mark.process
def test_what_a_function_logs_is_a_metric_of_the_trajectory() -> None:
    assert score(played("a b c"), "reward=[own_rewards:logs]").metrics == {"words": 3.0}


def test_arguments_are_trls_the_columns_and_facts_of_the_episode() -> None:
    facts = facts_of(task(), played("one", "97", reward=0.5), "answer", 0.5)
    given, made = arguments_of(load_function("reward.terms", "own_rewards:told"), facts, {"k": 2})
    assert given["prompts"] == [PROMPT] and given["completion_ids"] == [[2, 3, 4]]
    assert given["completions"] == [
        [
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "seen 1"},
            {"role": "assistant", "content": "97"},
        ]
    ]
    assert (given["answer"], given["level"], given["k"]) == (["97"], ["hard"], 2)
    assert (given["env_reward"], given["success"], given["tokens"]) == ([0.5], [False], [3])
    assert [turn["text"] for turn in given["transcript"][0]] == ["one", "97"]
    assert given["task"][0]["task_id"] == "t" and "prompt" not in given
    assert made == {"trainer_state": 7, "log_metric": 7}
    few, none = arguments_of(load_function("reward.terms", "own_rewards:correct"), facts, {})
    assert (sorted(few), none) == (["answer", "completions", "prompts"], {})


def test_a_column_comes_before_a_fact_of_its_name_and_never_before_what_trl_passes() -> None:
    row = ROW | {"success": "column", "completions": "column", "prompts": "column"}
    facts = facts_of(task(row=row), played("97", success=True), "answer", 0.5)
    given = facts.arguments()
    assert given["success"] == ["column"] and given["env_reward"] == [0.5]
    assert given["prompts"] == [PROMPT]
    assert given["completions"] == [[{"role": "assistant", "content": "97"}]]
    assert "prompt" not in given


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "failed: KeyError: 'turns'"),
        ("hangs", "did not return within 0.5 s"),
        ("exits", "failed: SystemExit: 0"),
        ("dies", "ended its process"),
        ("two", r"must return a list with one number, returned \[1\.0, 2\.0\]"),
        ("text", "returned much, which is no finite number"),
        ("number", "must return a list with one number, returned 1.0"),
        ("broken_bonus", "returned nan, which is no finite number"),
        ("async_hangs", "did not return within 0.5 s"),
        ("async_cancels", "failed: it was cancelled"),
        ("async_exits", "failed: SystemExit"),
        ("told", "namespace\\(global_step=7\\)"),
    ],
)
def test_a_function_that_misbehaves_is_a_failure_and_harms_nothing(name: str, problem: str) -> None:
    finished = played("97", reward=0.5)
    arguments = f"reward=[own_rewards:{name}]", "reward.timeout_s=0.5"
    with pytest.raises(Unscorable, match=rf"^reward\.terms: {name} .*{problem}"):
        score(finished, *arguments)
    assert (finished.trajectory.reward, finished.trajectory.terms) == (0.5, {})


@pytest.mark.process
def test_after_a_hanging_call_the_next_one_is_served() -> None:
    async def scored() -> dict[str, float]:
        terms = "[{name: own_rewards:hangs}]"
        scorer = RewardScorer(config(f"reward.terms={terms}", "reward.timeout_s=0.5"))
        with pytest.raises(Unscorable):
            await scorer.score(task(), played("97"), setting(), graded=False)
        other = RewardScorer(config("reward=[own_rewards:correct]", "reward.workers=1"))
        other._workers = scorer._workers
        finished = played("97")
        began = time.monotonic()
        await other.score(task(), finished, setting(), graded=False)
        assert time.monotonic() - began < 60.0
        await scorer.close()
        await other.close()
        return finished.trajectory.terms

    assert asyncio.run(scored()) == {"correct": 1.0}


@pytest.mark.process
def test_a_function_does_not_run_on_the_actors_loop() -> None:
    """The loop goes on while a function hangs, and its process ends with the scorer."""

    async def scored() -> int:
        scorer, ticks = RewardScorer(config("reward=[own_rewards:hangs]")), 0
        task_ = asyncio.create_task(scorer.score(task(), played("97"), setting(), graded=False))
        while not scorer._workers._living:
            await asyncio.sleep(0.01)
        (process,) = scorer._workers._living
        for _ in range(20):
            await asyncio.sleep(0.01)
            ticks += 1
        await scorer.close()
        with pytest.raises(Unscorable, match="ended its process"):
            await task_
        with pytest.raises(ProcessLookupError):
            os.kill(process._process.pid, 0)
        return ticks

    assert asyncio.run(scored()) == 20


def graded(server_url: str, *more: str) -> tuple[str, ...]:
    llm = f"reward.llm={{url: '{server_url}', model: m, retries: 0}}"
    return ("reward=[{name: llm, params: {instruction: be strict}}]", llm, *more)


def test_an_endpoint_grades_the_reply() -> None:
    with OpenAIServer(answer('{"score": 0.75}')) as server:
        one = score(played("97"), *graded(server.url))
        assert one.terms == {"llm": 0.75}
        (call,) = server.calls
        said = str(call.body)
        assert "What is 72 + 25?" in said and "be strict" in said and "97" in said


@pytest.mark.parametrize("reply", [answer("well"), answer('{"score": 7}'), status(400)])
def test_without_a_grade_the_episode_has_no_reward(reply: Any) -> None:
    with OpenAIServer(reply) as server, pytest.raises(Unscorable, match=r"^reward\.terms: llm "):
        score(played("97"), *graded(server.url))


def test_an_endpoint_that_is_not_there_is_a_failure() -> None:
    with pytest.raises(Unscorable, match=r"^reward\.terms: llm reward\.llm: "):
        score(played("97"), *graded(closed_url()))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["reward=[unknown]"], r"reward\.terms\[0\]\.name: must be one of"),
        (["reward=[exact, exact]"], r"reward\.terms\[1\]\.label: two terms are named exact"),
        (["reward=[{name: exact, label: total}]"], r"reward\.terms\[0\]\.label: total is a rule"),
        (["reward=[exact]", "reward.success=number"], r"reward\.success: must be one of .*exact"),
        (["reward=[{name: exact, wait: 1}]"], r"reward\.terms\[0\]\.wait: unknown key"),
        (["reward=[3]"], r"reward\.terms\[0\]: must be a mapping, is 3"),
        (["reward=[llm]"], r"reward\.llm\.url"),
        (["reward=[exact]", "reward.timeout_s=120"], r"reward\.timeout_s: must be less than"),
    ],
)
def test_an_impossible_list_of_terms_is_refused(arguments: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        config(*arguments)


@pytest.mark.parametrize("name", ["exact", "code", "tokens", "regex"])
def test_an_unknown_parameter_is_refused_by_its_key(name: str) -> None:
    terms = f"reward.terms=[{{name: {name}, params: {{colour: red}}}}]"
    with pytest.raises(ValueError, match=rf"^reward\.terms\[0\]\.params: {name}: .*"):
        RewardScorer(config(terms))


@pytest.mark.parametrize(
    ("argument", "facts", "problem"),
    [
        ("[own_rewards:slowly]", {"row": {"question": ""}}, "needs 'level', and prompts has quest"),
        ("[exact]", {"row": {"question": ""}}, "exact needs an answer .*: prompts has question"),
        ("[code]", {}, r"\.params\.tests: no column 'tests': prompts has question, answer, level"),
        ("[own_rewards:slowly]", {"row": {"level": 1}}, "is async: launch.kind=serial"),
    ],
)
def test_a_term_that_cannot_score_a_task_is_refused(
    argument: str, facts: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.terms\[0\].*{problem}"):
        check_terms(config(f"reward={argument}", serial=True), task(**facts))


def test_prompts_without_a_term_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^reward\.terms: env\.name=prompts has no reward"):
        check_terms(config(), task())


def test_short_and_long_forms_are_the_same() -> None:
    short = config("reward=[own_rewards:correct]").reward
    assert short == config("reward.terms=[own_rewards:correct]").reward
    assert short == config("reward=own_rewards:correct").reward
    assert short == config("reward={terms: [{name: own_rewards:correct}]}").reward
    assert short.terms[0].called == "correct" and short.terms[0].weight == 1.0


# ---- reward models


@pytest.mark.parametrize(
    "reply",
    [{"score": 1.5}, {"data": [{"probs": [1.5]}]}, {"data": [{"index": 0, "data": [1.5]}]}],
)
def test_a_served_reward_model_scores_the_conversation(reply: dict[str, Any]) -> None:
    asked = []

    def answered(path: str, headers: dict[str, str], body: Any) -> Reply:
        asked.append(body)
        return raw(reply)

    server = HttpServer(answered)
    server.start()
    try:
        model = f"reward.model={{url: '{server.url}/classify', name: m}}"
        one = score(played("let me see", "97"), "reward=[reward_model]", model)
    finally:
        server.end()
    assert one.terms == {"reward_model": 1.5} and one.reward == 1.5
    (body,) = asked
    assert body["model"] == "m"
    said = [(one["role"], one["content"]) for one in body["messages"]]
    assert said[0] == ("user", "What is 72 + 25?") and said[-1] == ("assistant", "97")


SILENT = Reply(body=b"{", announced=9, pause_s=60.0)  # it sends no more than a beginning


@pytest.mark.parametrize("bad", [Reply(status=503), Reply(drop=True), SILENT])
def test_a_served_reward_model_is_asked_again(bad: Reply) -> None:
    replies = [raw({"score": 2.0}), bad]
    server = HttpServer(lambda *_: replies.pop())
    server.start()
    try:
        model = f"reward.model={{url: '{server.url}', retries: 1}}"
        one = score(played("97"), "reward=[reward_model]", model, "reward.timeout_s=3")
    finally:
        server.end()
    assert one.reward == 2.0 and not replies


@pytest.mark.parametrize("reply", [Reply(status=500), raw({"data": []}), raw({"score": "good"})])
def test_without_a_score_the_episode_has_no_reward(reply: Reply) -> None:
    server = HttpServer(lambda *_: reply)
    server.start()
    try:
        with pytest.raises(Unscorable, match=r"^reward\.terms: reward_model "):
            model = f"reward.model={{url: '{server.url}', retries: 0}}"
            score(played("97"), "reward=[reward_model]", model)
    finally:
        server.end()


@pytest.mark.process
def test_a_directory_reads_tokens_of_its_own_tokenizer_and_messages_of_another(
    tmp_path: Path,
) -> None:
    for name, words in (("policy", []), ("like", []), ("other", ["further"])):
        make_tiny(
            tmp_path / name,
            **{"seed": 1, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32},
            max_length=64,
            words=words,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_pretrained(
                tmp_path / name, num_labels=1
            )
        model.save_pretrained(tmp_path / name)
    found = {}
    for name in ("like", "other"):
        terms = "reward=[reward_model]", f"reward.model.path={tmp_path / name}"
        policy = f"policy.path={tmp_path / 'policy'}"
        found[name] = score(played("97"), *terms, policy, "safety.max_lr=inf").reward
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        tokens = [1, 2, 3, 4]
        if name == "other":
            tokenizer = load_tokenizer(tmp_path / name)
            tokens = tokenizer.apply_chat_template(
                [*PROMPT, {"role": "assistant", "content": "97"}], return_dict=True
            )["input_ids"]
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([tokens])).last_hidden_state[0, -1]
            expected = float(model.score(hidden))
        assert found[name] == pytest.approx(expected, abs=1e-5)
    assert found["like"] != found["other"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["reward=[reward_model]"], r"reward\.terms: reward_model in stages\[0\] needs a model"),
        (
            ["reward=[reward_model]", "reward.model={path: a, url: 'http://b'}"],
            r"reward\.model\.url: must be empty",
        ),
        (["reward.model.url=ftp://b"], r"reward\.model\.url: must be an http"),
        (
            ["reward=[reward_model]", "reward.model.url='http://b'", "launch.kind=serial"],
            r"reward\.model\.url: needs real time",
        ),
        (
            ["policy.lora.rank=2", "stages=[{kind: reward_model, steps: 1}]"],
            r"policy\.lora\.rank: must be 0",
        ),
    ],
)
def test_a_reward_model_that_is_not_there_is_refused(arguments: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        config(*arguments)


def test_stages_have_terms_of_their_own() -> None:
    stages = "[{kind: rl, steps: 1}, {kind: rl, steps: 1, override: {reward: [exact]}}]"
    made = load(None, [f"stages={stages}", "reward=[tokens]"])

    async def scored() -> list[dict[str, float]]:
        scorer, found = RewardScorer(made), []
        for stage in (0, 1):
            finished = played("97")
            await scorer.score(task(), finished, setting(), graded=False, stage=stage)
            found.append(finished.trajectory.terms)
        await scorer.close()
        return found

    assert asyncio.run(scored()) == [{"tokens": 3.0}, {"exact": 1.0}]
