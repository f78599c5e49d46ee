"""Branches: every state of an expert's way, other actions really carried out, rows in the form of
rollouts, reasons that name what both actions led to."""

import asyncio
import json
import random
import re
from collections.abc import Callable

import msgspec
import numpy as np
import openai_server as openai
import pytest
from chatml import make_tokenizer
from demonstrations import demonstrated
from rollouts import CHAT, TOKENIZER, setting, ticket

from actors.checks.config import check
from actors.envs.base import Env, EnvironmentFailure, Rewindable, make_env
from actors.formats.chat import Chat
from actors.formats.tool_calls import ToolCall
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from actors.scripted.branching import BranchState, TriedTurn, branch_group, reflect_rows, try_turns
from actors.scripted.reflection import Reflector
from actors.ticket_progress import TicketProgress
from evolver_async.config import LlmConfig, ReflectionConfig, StageConfig
from evolver_async.config.load import load
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Role, Sampling, Sequence, Task, Ticket, Trajectory

LONG = 7  # a map of four by four whose shortest way has several moves


def branched(
    one: Ticket,
    how: Setting,
    kind: str = "world_model",
    alternatives: int = 3,
    most: int = 600,
    reflector: Reflector | None = None,
) -> list[Trajectory]:
    """The members of a branch ticket, in order."""
    done: list[Trajectory] = []
    granted = msgspec.structs.replace(
        one, kind="branch", sampling=Sampling(temperature=1.0, max_tokens=most)
    )
    stage = StageConfig(kind=kind, steps=1, alternatives=alternatives)

    def deliver(finished: Finished) -> None:
        done.append(finished.trajectory)

    asyncio.run(branch_group(granted, how, stage, TicketProgress(), deliver, reflector))
    return sorted(done, key=lambda trajectory: trajectory.member)


def parts(row: Sequence) -> tuple[str, str]:
    """What is shown and what is learnt, in words."""
    learnt = row.roles == Role.ACTION
    assert (np.flatnonzero(learnt) == np.arange(len(row) - learnt.sum(), len(row))).all()
    assert not row.logprobs.any() and row.versions == []
    shown, said = (TOKENIZER.decode(row.tokens[kind].tolist()) for kind in (~learnt, learnt))
    assert isinstance(shown, str) and isinstance(said, str)
    return shown, said


def way(one: Ticket, member: int = 0) -> list[tuple[list[str], Callable[[str], str]]]:
    """By state of the expert's way, slowly and from a fresh start each time: the expert's action
    with the others, and what the policy is told after an action there."""
    name, params = one.task.env, one.task.params

    def at(turn: int) -> Rewindable:
        env: Env = make_env(name, params)
        env.reset(one.task, key(one.dynamics_seed, member))
        assert isinstance(env, Rewindable)
        for _ in range(turn):
            env.step(env.solve()[0])
        return env

    def told(turn: int) -> Callable[[str], str]:
        def after(action: str) -> str:
            step = at(turn).step(action)
            won = "success" if step.info.success else "failed"
            return f"{step.observation} done {won}".strip() if step.terminated else step.observation

        return after

    states, turn = [], 0
    while True:
        env = at(turn)
        expert = env.solve()[0]
        others = [action for action in env.actions() if action != expert]
        states.append(([expert, *others], told(turn)))
        turn += 1
        if env.step(expert).terminated:
            return states


LAKE = {"size": 3, "hints": False}
LEVEL = {"size": 4, "layout": "open", "max_solution": 3}


@pytest.mark.parametrize(
    "env, params", [("frozen_lake", LAKE), ("sokoban", LEVEL), ("workshop", {"fatal": False})]
)
def test_world_rows_say_what_every_action_really_leads_to(env, params):
    for group_id in range(4):
        one = ticket(params, members=6, group_id=group_id, env=env)
        expected = way(one)
        met = set()
        for trajectory in branched(one, setting()):
            assert trajectory.policy == "scripted" and trajectory.success
            turns = {int(row.turns.max()) for row in trajectory.sequences}
            (turn,) = turns
            met.add(turn)
            (expert, *others), told = expected[turn]
            rows = [parts(row) for row in trajectory.sequences]
            written = [
                re.search(r"<answer> (\w+)</answer>(?!.*</answer>)", shown, re.DOTALL)
                for shown, _ in rows
            ]
            actions = [found[1] for found in written if found]
            assert actions[0] == expert
            assert set(actions[1:]) <= set(others) and len(set(actions)) == len(actions)
            assert len(actions) == 1 + min(3, len(others))
            for action, (_, learnt) in zip(actions, rows, strict=True):
                assert learnt == told(action) + "<|im_end|>"
        assert met == set(range(min(6, len(expected))))


def test_the_context_of_a_row_is_the_one_that_a_policy_meets_in_that_state():
    """A demonstration of the same task has every row's prompt, and the expert's outcome after it,
    token for token."""
    from demonstrations import demonstrated

    one = ticket({"size": 4}, members=5, group_id=LONG)
    (whole, *_) = demonstrated(one, setting(), 1.0)
    stream = whole.sequences[0].tokens.tolist()
    for trajectory in branched(one, setting()):
        row = trajectory.sequences[0]
        last = int(row.turns.max()) == len(whole.turn_rewards) - 1
        length = len(stream) if last else len(row)
        assert stream[:length] == row.tokens[:length].tolist()


@pytest.mark.parametrize("context, window", [("single", 1), ("window", 1)])
def test_rows_follow_the_contexts_of_the_rollouts(context, window):
    how = setting(context=context, window=window)
    one = ticket({"size": 4}, members=12, group_id=LONG)
    full = {int(t.sequences[0].turns.max()): len(t.sequences[0]) for t in branched(one, setting())}
    short = {int(t.sequences[0].turns.max()): len(t.sequences[0]) for t in branched(one, how)}
    last = max(full)
    assert last >= 3 and short.keys() == full.keys()
    assert short[0] == full[0] and short[last] < full[last]


def test_a_reflection_holds_both_outcomes_and_ends_in_the_experts_action():
    how = setting(think=True)
    for group_id in range(3):
        one = ticket({"size": 3, "grid": "first", "hints": True}, members=4, group_id=group_id)
        expected = way(one)
        for trajectory in branched(one, how, "reflect", alternatives=2):
            (turn,) = {int(row.turns.max()) for row in trajectory.sequences}
            (expert, *others), told = expected[turn]
            assert len(trajectory.sequences) == min(2, len(others))
            for row in trajectory.sequences:
                shown, learnt = parts(row)
                assert shown.endswith("<think>")
                actions = how.format.parse(learnt)
                assert actions == [expert]
                (other,) = [o for o in others if learnt.startswith(f" {o} then ")]
                for action in (other, expert):
                    assert f"{action} then {' '.join(told(action).split())}" in learnt
                assert f". choose {expert} </think><answer>" in learnt


def test_reasons_and_outcomes_spell_no_special_token():
    """Also one that is not in angle brackets: what is learnt ends where the turn does."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]"]})
    how = setting(chat=Chat(tokenizer), think=True)
    style, special = how.format, tokenizer.convert_tokens_to_ids("[gMASK]")
    expert, other = TriedTurn(["left"], "a [gMASK]", ""), TriedTurn(["right"], "b [gMASK]", "")
    state = BranchState(0, [1, 2], expert, [other, other])
    for row in reflect_rows(state, how, 600, ["so [gMASK] it is", None]):
        assert special not in row.tokens
        assert tokenizer.decode(row.tokens.tolist()).endswith(style.render_actions(["left"]))


class Weighted:
    """Names one action twice, as what its random player chooses from; every action is taken."""

    instructions = ""

    def reset(self, task: Task, dynamics_seed: int) -> str:
        return "begun"

    def step(self, action: str) -> Step:
        return Step(f"did {action}", 0.0, False, False, Info())

    def close(self) -> None: ...

    def actions(self) -> list[str]:
        return ["Guess", "guess", "guess", "guess", "other", "best"]

    def solve(self) -> list[str]:
        return ["best"]

    def state(self) -> str:
        return ""

    def snapshot(self) -> None: ...

    def restore(self, snapshot: None) -> None: ...


def test_alternatives_differ_from_each_other():
    for seed in range(8):
        tried = try_turns(Weighted(), setting().format, 2, random.Random(seed))
        assert sorted(one.actions[0].lower() for one in tried) == ["best", "guess", "other"]


def test_a_reflection_is_cut_to_the_tokens_of_a_turn_or_refused():
    one = ticket({"size": 4}, members=2, group_id=LONG)
    whole, cut = (
        [
            row
            for one in branched(one, setting(think=True), "reflect", most=most)
            for row in one.sequences
        ]
        for most in (600, 150)
    )
    for long, short in zip(whole, cut, strict=True):
        sizes = [(row.roles == Role.ACTION).sum() for row in (short, long)]
        assert sizes[0] <= 150 and (sizes[0] < sizes[1] or sizes[1] <= 150)
        assert set(parts(short)[1].split()) <= set(parts(long)[1].split()), "no word is cut"
    config = [
        "env.params={size: 3}",
        "rollout={think: true, max_tokens: 12}",
        "stages=[{kind: reflect, steps: 1}]",
    ]
    from actors.checks import prompt_checks

    with pytest.raises(ValueError, match=r"^rollout\.max_tokens: 12 is too small for a turn with"):
        prompt_checks._check_first(
            load(None, config), setting(think=True), ticket({"size": 3}).task, True
        )


def test_a_reason_that_does_not_fit_is_a_failure_of_the_task_and_not_of_the_actor():
    one = ticket({"size": 4}, members=2, group_id=LONG)
    whole = branched(one, setting(think=True), "reflect", alternatives=0)
    most = max(int((row.roles == Role.ACTION).sum()) for t in whole for row in t.sequences)
    with pytest.raises(EnvironmentFailure, match=r"ValueError: rollout\.max_tokens: .* too small"):
        branched(one, setting(think=True), "reflect", most=most)


def test_several_actions_a_turn_are_tried_as_whole_turns():
    how = setting(actions_per_turn=2)
    one = ticket({"size": 4, "hints": False}, members=2, group_id=LONG)
    for trajectory in branched(one, how):
        rows = [parts(row)[0] for row in trajectory.sequences]
        turns = [
            re.findall(r"<answer> ([^<]*)</answer>", shown)[-1].split(" || ") for shown in rows
        ]
        assert len({turn[0] for turn in turns}) == len(turns) >= 2
        assert {len(turn) for turn in turns} == {len(turns[0])}


def test_branches_are_the_same_for_the_same_seed_and_differ_between_groups():
    def rows(group_id: int) -> list[list[int]]:
        one = ticket({"size": 4}, members=3, group_id=group_id)
        same = msgspec.structs.replace(one, task=ticket({"size": 4}, group_id=LONG).task)
        return [
            r.tokens.tolist()
            for t in branched(same, setting(), alternatives=1)
            for r in t.sequences
        ]

    assert rows(1) == rows(1)
    assert len({str(rows(group_id)) for group_id in range(5)}) > 1


def test_what_cannot_be_branched_or_reflected_on_is_refused():
    def refusal(*arguments: str) -> str:
        with pytest.raises(ValueError) as caught:
            check(load(None, arguments))
        return str(caught.value)

    model, reflect = "stages=[{kind: world_model, steps: 1}]", "stages=[{kind: reflect, steps: 1}]"
    check(load(None, [model]))
    check(load(None, [reflect, "rollout.think=true"]))
    needs = "needs solve, state and snapshot, which env.name=bandit has not"
    for kind, stage in (("world_model", model), ("reflect", reflect)):
        assert refusal(stage, "env.name=bandit").startswith(f"stages[0].kind: {kind} {needs}")
    mixed = "tasks.mixture=[{env: frozen_lake}, {env: bandit}]"
    assert refusal(model, mixed).startswith(f"stages[0].kind: world_model {needs}")
    served = ["env.name=agentevolver", "env.params={url: 'http://x', env_type: a, name: b}"]
    said = refusal("stages=[{kind: sft, steps: 1}]", *served)
    assert said.startswith("stages[0].kind: sft needs solve and actions")
    assert (
        refusal(reflect) == "stages[0].kind: reflect has no place for a reason: set rollout.think"
    )


def test_a_message_is_the_same_tokens_alone_as_between_turns():
    for text in ("", "row 1", "PSF_\n_O_G\nrow 1 column 2", "é <|end|> ü"):
        before, said = CHAT.message(text)
        assert CHAT.next(text, "", None)[: len(before) + len(said)] == before + said
        assert TOKENIZER.decode(said) == CHAT.plain(text) + "<|im_end|>"


def test_tool_calls_are_reflected_on_in_their_own_form():
    style = ToolCall(think=True, actions_per_turn=1)
    text = " a then b " + style.render_actions(['{"name": "go", "arguments": {}}'])
    assert style.parse(text) == ['{"name": "go", "arguments": {}}']


def reflected(server: openai.OpenAIServer, most: int = 600) -> tuple[list[str], dict[str, float]]:
    """What is learnt where this server writes the reasons, and what was counted."""
    one = ticket({"size": 3, "grid": "first"}, members=2, group_id=3)
    llm = LlmConfig(url=server.url, model="m", retries=0, timeout_s=2.0)
    reflector = Reflector(ReflectionConfig(kind="llm", timeout_s=2.0, llm=llm))
    group = branched(one, setting(think=True), "reflect", 2, most, reflector)
    return [parts(row)[1] for t in group for row in t.sequences], reflector.counters()


def test_a_model_that_writes_reasons_is_shown_both_outcomes() -> None:
    with openai.OpenAIServer(otherwise="The other way\nends in a </think> hole .") as server:
        learnt, counted = reflected(server)
        asked = [
            json.loads(call.body["messages"][0]["content"].partition("\n\n")[2])
            for call in server.calls
        ]
    assert len(learnt) == len(asked) == counted["reflection/written"] >= 2
    one = ticket({"size": 3, "grid": "first"}, members=2, group_id=3)
    states = way(one)
    for question in asked:
        actions, told = next(
            (actions, told)
            for actions, told in states
            if actions[0] == question["expert"]["action"]
        )
        other = question["other"]
        assert other["action"] in actions[1:]
        assert {told(other["action"]), told(actions[0])} == {
            other["outcome"],
            question["expert"]["outcome"],
        }
        assert "row" in question["situation"]
    for text in learnt:
        assert text.startswith(" The other way ends in a < /think> hole . </think><answer>")


@pytest.mark.parametrize("bad", [openai.status(500), openai.garbage(), "", "  \n"])
def test_without_an_answer_the_template_writes_the_reason(bad) -> None:
    with openai.OpenAIServer(otherwise=bad) as server:
        learnt, counted = reflected(server)
    assert len(learnt) == counted["reflection/by_template"] >= 2
    assert all(" then " in text and ". choose " in text for text in learnt)


def test_a_long_reason_is_cut_at_a_word() -> None:
    with openai.OpenAIServer(otherwise="because " * 300) as server:
        learnt, _ = reflected(server, most=200)
    for text in learnt:
        words = text.partition("</think>")[0].split()
        assert set(words) == {"because"} and len(words) > 10


def test_states_whose_outcomes_have_no_room_are_left_out_and_none_at_all_is_a_failure() -> None:
    one = ticket({"size": 4}, members=12, group_id=LONG)
    (longest,) = {len(t.sequences[0]) for t in branched(one, setting()) if _turn(t) == 2}
    how = setting(max_length=longest + 590)  # of which a turn may need 600
    assert {_turn(trajectory) for trajectory in branched(one, how)} <= {0, 1, 2}
    starts = next(t.sequences for t in branched(one, setting()) if _turn(t) == 0)
    first = min((row.roles == Role.PROMPT).sum() for row in starts)
    with pytest.raises(EnvironmentFailure, match=r"branching .*policy\.max_length"):
        branched(one, setting(max_length=int(first)), most=1)


def _turn(trajectory: Trajectory) -> int:
    return int(trajectory.sequences[0].turns.max())


class Forgetful:
    """FrozenLake without a way back, and without a solver."""

    instructions, turn_format = "Walk.", "think_answer"

    def __init__(self, size: int, hints: bool) -> None:
        self._lake = make_env("frozen_lake", {"size": size, "hints": hints})

    def reset(self, task: Task, dynamics_seed: int) -> str:
        return self._lake.reset(task, dynamics_seed)

    def step(self, action: str) -> Step:
        return self._lake.step(action)

    def close(self) -> None: ...

    def actions(self) -> list[str]:
        return self._lake.actions()


class Waiting(Forgetful):
    """The same as a service: every call is awaited."""

    async def reset(self, task: Task, dynamics_seed: int) -> str:
        return super().reset(task, dynamics_seed)

    async def step(self, action: str) -> Step:
        return super().step(action)


@pytest.mark.parametrize("kind", ["world_model", "reflect"])
@pytest.mark.parametrize("env", ["frozen_lake", "Forgetful", "Waiting"])
def test_an_expert_s_file_gives_the_rows_that_its_solver_gives(env: str, kind: str) -> None:
    """Also where the environment cannot go back: each turn is tried in an episode of its own."""
    for group_id in range(3):
        one = ticket(LAKE, members=3, group_id=group_id)
        how = setting(think=kind == "reflect")
        solved = branched(one, how, kind)
        actions = [told[0][0] for told in way(one)]
        name = env if env == "frozen_lake" else f"{__name__}:{env}"
        task = msgspec.structs.replace(one.task, env=name, reference=actions)
        again = branched(msgspec.structs.replace(one, task=task), how, kind)
        for other, same in zip(solved, again, strict=True):
            assert [parts(row)[1] for row in other.sequences] == [
                parts(row)[1] for row in same.sequences
            ]
            assert same.success


def test_an_expert_s_file_is_imitated_to_its_end(tmp_path) -> None:
    one = ticket(LAKE, members=1, group_id=LONG)
    actions = [told[0][0] for told in way(one)][:-1]
    task = msgspec.structs.replace(one.task, env=f"{__name__}:Forgetful", reference=actions)
    (shown,) = demonstrated(msgspec.structs.replace(one, task=task), setting(), 1.0)
    assert len(shown.turn_rewards) == len(actions) and not shown.success
    rows = tmp_path / "experts.jsonl"
    rows.write_text(json.dumps({"seed": one.task.map_seed, "reference": actions}))
    data = f"{{kind: world_model, steps: 1, data: {{path: {rows}}}}}"
    env = [
        f"env.name={__name__}:Forgetful",
        f"env.params={json.dumps(LAKE)}",
        "rollout.max_turns=5",
    ]
    check(load(None, [*env, f"stages=[{data}]"]))
    with pytest.raises(ValueError, match="reference"):
        check(load(None, [*env, "stages=[{kind: world_model, steps: 1}]"]))
