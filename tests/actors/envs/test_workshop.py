"""The workshop: rules shared by all tasks, held-out items, rare success, words of one token."""

import itertools
from typing import Any

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.envs.base import (
    Described,
    EnvError,
    Exact,
    Goals,
    Measurable,
    Rewindable,
    Scored,
    Tooled,
    make_env,
)
from actors.envs.workshop.items import ACTIONS, ATTRIBUTES, LEAST_ITEMS, MOST_NAMES, items_of
from actors.envs.workshop.workshop_env import ToolWorkshop, Workshop
from actors.formats.tool_calls import canonical
from actors.judge.labels import by_progress
from evolver_async.env import Info
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import Task
from evolver_async.splits import split_of

SIZES = st.tuples(st.integers(2, len(ATTRIBUTES)), st.integers(2, MOST_NAMES)).filter(
    lambda size: LEAST_ITEMS <= size[1] ** size[0] <= 5000
)


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"workshop/{split}/{number}", env="workshop", split=split, map_seed=number)


def begun(number: int = 0, split: str = "train", **params: Any) -> Workshop:
    env = Workshop(**params)
    env.reset(task(number, split), 0)
    return env


def another(env: Workshop) -> str:
    """An action that is wrong now."""
    return next(action for action in env.actions() if action != env.solve()[0])


def test_the_workshop_has_every_ability() -> None:
    for name in ("workshop", "workshop_tools"):
        env = make_env(name, {})
        for ability in (Described, Rewindable, Scored, Goals, Measurable):
            assert isinstance(env, ability)
        assert isinstance(env, Tooled) == (name == "workshop_tools")


@settings(max_examples=examples(30), deadline=None)
@given(SIZES)
def test_splits_are_by_item_and_every_name_can_be_learned(size: tuple[int, int]) -> None:
    steps, names = size
    items = items_of(steps, names)
    everything = list(itertools.chain.from_iterable(items.values()))
    assert len(everything) == len(set(everything)) == names**steps
    assert {"train", "test"} <= items.keys()
    for split, found in items.items():
        assert all(split_of(" ".join(item)) == split for item in found)
    for number, attribute in enumerate(ATTRIBUTES[:steps]):
        assert {item[number] for item in items["train"]} == set(attribute[:names])


def test_consecutive_tasks_are_different_items_and_go_round_the_split() -> None:
    for split in ("train", "test"):
        items = items_of(3, 8)[split]
        seen = [begun(number, split).item for number in range(len(items) + 2)]
        assert len(set(seen)) == len(items) and seen[-2:] == seen[:2]
    with pytest.raises(ValueError, match=r"^split: 'dev' is none of"):
        begun(split="dev")


def test_every_word_is_one_token_of_the_tiny_preset() -> None:
    tokenizer = make_tokenizer(512)
    names = list(itertools.chain.from_iterable(ATTRIBUTES))
    assert len(set(names) | set(ACTIONS)) == len(names) + len(ACTIONS)
    texts = [*(f" {word}" for word in (*names, *ACTIONS)), "item", "step"]
    for text in texts:
        assert len(tokenizer.encode(text)) == 1, text
    for params in ({}, {"fatal": False}, {"choices": 8, "names": 12, "steps": 5}):
        env = begun(**params)
        text = f"{env.instructions} {env.reset(task(), 0)}"
        assert len(tokenizer.encode(text)) == len(text.replace("\n", " \n ").split(" "))


@settings(max_examples=examples(60), deadline=None)
@given(SIZES, st.integers(2, 8), st.integers(0, 2000), st.booleans(), st.booleans())
def test_the_solution_succeeds_at_its_end(
    size: tuple[int, int], choices: int, number: int, test: bool, fatal: bool
) -> None:
    steps, names = size
    params: dict[str, Any] = {"names": names, "choices": choices, "fatal": fatal, "secret": number}
    env = begun(number, "test" if test else "train", steps=steps, **params)
    moves = env.solve()
    results = [env.step(move) for move in moves]
    assert [step.terminated for step in results] == [False] * (steps - 1) + [True]
    assert [step.reward for step in results] == [0.0] * (steps - 1) + [1.0]
    assert results[-1].info.success and env.score() == steps
    assert env.exact(steps) == Exact(choices**-steps, 1.0)
    assert env.exact(steps - 1) == Exact(0.0, 0.0)


@pytest.mark.parametrize("fatal", [True, False])
def test_exact_is_the_share_of_all_ways_that_succeed(fatal: bool) -> None:
    env = begun(3, choices=3, fatal=fatal)
    won = 0
    for way in itertools.product(env.actions(), repeat=3):
        env.reset(task(3), 0)
        for action in way:
            step = env.step(action)
            if step.terminated:
                break
        assert step.terminated
        won += step.info.success
    assert won == 1 and env.exact(3).random == pytest.approx(1 / 27)


def test_a_name_needs_the_same_action_in_every_item_of_every_split() -> None:
    needed: dict[str, str] = {}
    for split in ("train", "test"):
        for number in range(200):
            env = begun(number, split)
            for name, action in zip(env.item, env.solve(), strict=True):
                assert needed.setdefault(name, action) == action
    assert len(needed) == 24 and set(needed.values()) == set(ACTIONS[:4])
    other = [begun(number, secret=1).solve() for number in range(20)]
    assert other != [begun(number).solve() for number in range(20)]


def test_an_observation_ends_with_the_name_that_decides() -> None:
    env = Workshop()
    first = env.reset(task(5), 0)
    one, two, three = env.item
    assert first == f"item {one} {two} {three}\nstep 1 {one}" and env.state() == one
    assert env.step(" Jump ") == (f"step 1 {one}", 0.0, False, False, Info(valid=False))
    step = env.step(f" {env.solve()[0].title()} ")
    assert step.observation == f"step 2 {two}" and env.state() == two


def test_a_wrong_action_ends_the_episode_or_is_not_told_before_the_end() -> None:
    env = begun()
    step = env.step(another(env))
    assert (step.terminated, step.reward, step.info.success, env.score()) == (True, 0.0, False, -1)
    untold, right = begun(fatal=False), begun(fatal=False)
    scores = [untold.score()]
    for number in range(3):
        wrong = number == 1
        seen = untold.step(another(untold) if wrong else untold.solve()[0])
        twin = right.step(right.solve()[0])
        scores.append(untold.score())
        if number < 2:
            assert seen == twin and untold.state() == right.state()
    assert (seen.terminated, seen.reward, seen.info.success) == (True, 0.0, False)
    assert twin.info.success
    assert by_progress(scores) == [1, -1, 1]


def test_a_snapshot_brings_the_state_back() -> None:
    env = begun(fatal=False)
    kept, before = env.snapshot(), (env.state(), env.solve(), env.score())
    for action in env.actions()[:2]:
        env.step(action)
    assert (env.state(), env.solve(), env.score()) != before
    env.restore(kept)
    assert (env.state(), env.solve(), env.score()) == before


def test_states_reached_in_a_free_episode_are_goals_of_the_right_actions_alone() -> None:
    right = begun(7).solve()
    env = begun(7, free=True)
    assert env.goal() is None and env.exact(9) == Exact(0.0, 0.0)
    taken, goals = [], []
    while env.state() != "done":
        for action in env.actions():
            before = env.state()
            step = env.step(action)
            assert not step.terminated and step.info.valid == (env.state() != before)
            if step.info.valid:
                taken.append(action)
                goals.append(env.goal())
                break
    assert taken == right and not env.step(right[0]).info.valid
    assert goals == [{"free": False, "until": number} for number in (1, 2, 3)]
    for number, goal in enumerate(goals, 1):
        made = begun(7, **(goal or {}))
        steps = [made.step(action) for action in right[:number]]
        assert steps[-1].info.success and steps[-1].terminated
        assert not any(step.terminated for step in steps[:-1])
        assert made.exact(3).random == 4.0**-number
    with pytest.raises(ValueError, match="free"):
        env.solve()


def test_the_tool_plays_the_same_game() -> None:
    words, calls = begun(4), ToolWorkshop()
    assert calls.reset(task(4), 0) == f"item {' '.join(words.item)}\nstep 1 {words.item[0]}"
    (spec,) = calls.tools()
    assert spec["parameters"]["properties"]["action"]["enum"] == words.actions()
    for action in ("push", canonical("work", {"action": 3}), canonical("make", {"action": "push"})):
        step = calls.step(action)
        assert step.observation.startswith("error: no such action\nstep 1 ")
        assert not step.info.valid and step.info.tool_error
    for word, call in zip(words.solve(), calls.solve(), strict=True):
        assert call == canonical("work", {"action": word})
        step = calls.step(call)
        assert step == words.step(word)
    assert step.info.success


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"steps": 1}, "steps"),
        ({"steps": 6}, "steps"),
        ({"names": 13}, "names"),
        ({"names": 3}, "names"),
        ({"choices": 1}, "choices"),
        ({"choices": 9}, "choices"),
        ({"until": 4}, "until"),
    ],
)
def test_parameters_out_of_range_are_named(params: dict[str, int], named: str) -> None:
    with pytest.raises(EnvError, match=rf"^env\.params\.{named}:"):
        make_env("workshop", params)
