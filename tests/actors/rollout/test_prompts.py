"""The system message: its wordings, the system prompt of a run, and the check before a run."""

import pytest
from rollouts import CHAT, setting, ticket

from actors.checks import prompts
from actors.envs.base import Described, Solvable, make_env
from actors.formats.tool_calls import Interleaved, ToolCall
from actors.rollout.conversation import first_prompt, system_message
from actors.rollout.episode_config import PLAIN_VOCABULARY, setting_of, wording_of
from evolver_async.config.load import load
from evolver_async.config.values.errors import ConfigError
from evolver_async.env import Step
from evolver_async.schema import Task

STEPS = "stages=[{kind: rl, steps: 1}]"
BUILT_IN = (
    *("bandit", "cliff_walking", "code", "frozen_lake", "sokoban", "webshop", "webshop_tools"),
    *("workshop", "workshop_tools", "bookings"),
)


class Foreign:
    """An environment with one wording."""

    instructions = "Do what is asked."

    def reset(self, task: Task, dynamics_seed: int) -> str:
        return ""

    def step(self, action: str) -> Step:
        raise AssertionError

    def close(self) -> None:
        pass


def test_the_tiny_wording_is_the_one_that_small_policies_were_trained_with() -> None:
    assert system_message(setting(), make_env("frozen_lake", {})) == (
        "walk over the ice from P to the goal G . O is a hole . actions left down right up ."
        " reply with <answer> action</answer>"
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_environment_has_instructions_in_plain_english(name: str) -> None:
    env = make_env(name, {})
    assert isinstance(env, Described)
    told = system_message(setting(wording="plain"), env)
    assert told.startswith(f"{env.plain_instructions}\n\nReply with exactly one action")
    assert " ." not in env.plain_instructions and env.plain_instructions.endswith(".")
    listed = ("bandit", "cliff_walking", "frozen_lake", "sokoban", "workshop")
    if isinstance(env, Solvable) and name in listed:
        env.reset(ticket().task, 0)
        words = env.plain_instructions.replace(",", " ").replace(".", " ").split()
        assert set(env.actions()) <= set(words)


def test_only_a_slippery_lake_is_called_slippery() -> None:
    for name in ("frozen_lake", "cliff_walking"):
        for slippery in (False, True):
            env = make_env(name, {"slippery": slippery})
            assert ("slippery" in system_message(setting(wording="plain"), env)) == slippery


def test_an_environment_with_one_wording_keeps_it() -> None:
    assert system_message(setting(wording="plain"), Foreign()).startswith("Do what is asked.\n\n")


def test_a_system_prompt_replaces_what_the_format_says_and_nothing_else() -> None:
    env = make_env("code", {})
    tools = ToolCall(think=False, actions_per_turn=1)
    how = setting(wording="plain", system_prompt="Use tools.", format=tools)
    assert isinstance(env, Described)
    told, _, listed = system_message(how, env).partition("\n<tools>\n")
    assert told == f"{env.plain_instructions}\n\nUse tools." and '"python"' in listed
    tiny = setting(system_prompt="use tools", format=tools)
    assert system_message(tiny, env).startswith(f"{env.instructions} use tools\n<tools>")


def test_tool_formats_name_their_tags_in_plain_english() -> None:
    env = make_env("code", {})
    for think in (False, True):
        style = ToolCall(think=think, actions_per_turn=2)
        told = system_message(setting(wording="plain", format=style), env)
        assert all(tag in told for tag in ("<tool_call>", "</tool_call>", "<answer>", "up to 2"))
        assert ("<reason>" in told) == think
    inline = Interleaved(think=False, actions_per_turn=1)
    told = system_message(setting(wording="plain", format=inline), env)
    assert all(tag in told for tag in ("<code>", "<interpreter>", "\\boxed{"))


def test_the_size_of_the_vocabulary_decides_where_nobody_does() -> None:
    assert wording_of("auto", PLAIN_VOCABULARY - 1) == "tiny"
    assert wording_of("auto", PLAIN_VOCABULARY) == "plain"
    assert [wording_of(prompt, 100) for prompt in ("tiny", "plain")] == ["tiny", "plain"]
    assert wording_of("tiny", 10 * PLAIN_VOCABULARY) == "tiny"
    config = load(None, [STEPS])
    assert setting_of(config, CHAT, "", 0).wording == "tiny", "tests write a token a byte"
    assert setting_of(load(None, [STEPS, "env.prompt=plain"]), CHAT, "", 0).wording == "plain"


def test_the_check_before_a_run_measures_the_prompt_that_the_run_will_use() -> None:
    def check(*changes: str) -> None:
        config = load(None, [STEPS, *changes])
        prompts._check_first(config, setting_of(config, CHAT, "", 0), task, False)

    task, env = ticket().task, make_env("frozen_lake", {})
    seen = env.reset(task, 0)
    tiny, plain = (len(first_prompt(setting(wording=w), env, seen)) for w in ("tiny", "plain"))
    assert plain > tiny + 16
    fits = f"policy.max_length={tiny + 16}"
    check(fits)
    for change in ("env.prompt=plain", f"rollout.system_prompt={'please ' * 10}"):
        with pytest.raises(ConfigError, match=r"^policy\.max_length: .* is too short"):
            check(fits, change)
    check(f"policy.max_length={plain + 16}", "env.prompt=plain")
