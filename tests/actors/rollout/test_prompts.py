"""The system message: its wordings, the system prompt of a run, and the check before a run."""

import asyncio
import json
from pathlib import Path

import pytest
from chatml import TEMPLATE, make_tokenizer
from families import family_tokenizer
from rollouts import CHAT, Corridor, setting, ticket

from actors.checks import prompt_checks
from actors.envs.base import Described, Solvable, make_env
from actors.envs.return_checks import checked_opening
from actors.formats.chat import Chat
from actors.formats.tool_calls import Interleaved, ToolCall
from actors.rollout.conversation import first_prompt, system_message, tools_of
from actors.rollout.episode_config import (
    PLAIN_VOCABULARY,
    format_name,
    setting_of,
    with_formats,
    wording_of,
)
from evolver_async.config.load import load, stage_config
from evolver_async.config.values.config_error import ConfigError
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
    told, _, listed = system_message(how, env, asyncio.run(tools_of(how, env))).partition(
        "\n<tools>\n"
    )
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
        prompt_checks._check_first(config, setting_of(config, CHAT, "", 0), task, False)

    task, env = ticket().task, make_env("frozen_lake", {})
    seen = checked_opening(env.reset(task, 0))
    tiny, plain = (len(first_prompt(setting(wording=w), env, seen)) for w in ("tiny", "plain"))
    assert plain > tiny + 16
    fits = f"policy.max_length={tiny + 16}"
    check(fits)
    for change in ("env.prompt=plain", f"rollout.system_prompt={'please ' * 10}"):
        with pytest.raises(ConfigError, match=r"^policy\.max_length: .* is too short"):
            check(fits, change)
    check(f"policy.max_length={plain + 16}", "env.prompt=plain")


def policy(directory: Path, tokens: int) -> str:
    """A directory whose model has so many tokens, as a change of the configuration."""
    (directory / "config.json").write_text(json.dumps({"vocab_size": tokens}))
    return f"policy.path={directory}"


def test_auto_is_what_the_environment_is_made_for_or_what_the_model_can_write(
    tmp_path: Path,
) -> None:
    def named(*changes: str) -> str:
        return format_name(load(None, [STEPS, *changes]))

    assert named() == named(policy(tmp_path, 300)) == "think_answer", "also a preset's export"
    assert named(policy(tmp_path, 49_152)) == "chat"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 262_144}}))
    assert named(f"policy.path={tmp_path}") == named("policy.path=org/name") == "chat"
    for tags in ("rollout.think=true", "rollout.actions_per_turn=2"):
        assert named(tags, "policy.path=org/name") == "think_answer"
    for env, wanted in (("prompts", "chat"), ("bookings", "tool_call"), ("code", "think_answer")):
        assert named(f"env.name={env}") == wanted
    assert named("env.name=bookings", "rollout.format=chat") == "chat", "a choice is kept"
    for family, wanted in (("qwen2_5", "native"), ("gemma2", "tool_call")):
        family_tokenizer(family).save_pretrained(tmp_path / family)
        calling = "env.name=bookings", policy(tmp_path / family, 49_152)
        assert named(*calling) == wanted
        assert named(*calling, "rollout.think=true") == "tool_call"
    mixed = "tasks.mixture=[{env: frozen_lake, weight: 1}, {env: prompts, weight: 1}]"
    with pytest.raises(ConfigError, match=r"^rollout\.format: auto .*chat, none"):
        named(mixed)
    assert named(mixed, "rollout.format=chat") == "chat"


def test_a_run_keeps_the_format_that_auto_meant_at_its_start(tmp_path: Path) -> None:
    stages = "stages=[{kind: rl, steps: 1}, {kind: rl, steps: 1, override: {env: {name: prompts}}}]"
    config = load(None, [stages])
    kept = with_formats(config)
    assert kept.rollout.format == "think_answer" and not kept.stages[0].override
    moved = load(None, [stages, policy(tmp_path, 49_152)])
    for one in (kept, with_formats(kept)):
        names = [stage_config(one, index).rollout.format for index in range(2)]
        assert names == ["think_answer", "chat"]
    assert with_formats(moved).rollout.format == "chat"
    agent = load(None, [STEPS, "rollout.agent=examples.reply:reply"])
    assert with_formats(agent) == agent, "it is refused with any other format"


def test_a_template_that_opens_the_thought_is_known_to_the_format() -> None:
    thinking = Chat(
        make_tokenizer(TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    )
    config = load(None, [STEPS, "rollout.format=chat"])
    assert setting_of(config, thinking, "", 0).format.parse("up") is None
    assert setting_of(config, CHAT, "", 0).format.parse("up") == ["up"]


class Compared(Corridor):
    """Its actions spell what other formats read as marks."""

    def actions(self) -> list[str]:
        return ["right", "a || b"]

    def solve(self) -> list[str]:
        return ["a < b"]

    def state(self) -> str:
        return str(self.position)

    def snapshot(self) -> int:
        return self.position

    def restore(self, snapshot: int) -> None:
        self.position = snapshot


@pytest.mark.parametrize(
    ("stage", "changes", "shown"),
    [
        ("{kind: sft, steps: 1}", [], "a < b"),
        ("{kind: world_model, steps: 1}", [], "a < b"),
        ("{kind: reflect, steps: 1}", ["rollout.think=true"], "a < b"),
        ("{kind: sft, steps: 1, expert_fraction: 0}", [], r"a \|\| b"),
        ("{kind: sft, steps: 1}", ["rollout.format=chat", "rollout.extract=last_number"], "a < b"),
        ("{kind: sft, steps: 1}", ["rollout.format=chat"], ""),
        ("{kind: world_model, steps: 1}", ["rollout.format=chat"], ""),
        ("{kind: sft, steps: 1}", ["rollout.format=chat", "rollout.extract=<move>"], ""),
    ],
)
def test_a_demonstration_that_its_format_cannot_read_is_refused(
    tmp_path: Path, stage: str, changes: list[str], shown: str
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    shape = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    keys = [f"env.name={__name__}:Compared", f"policy.path={tmp_path}", "policy.max_length=512"]
    config = load(None, [f"stages=[{stage}]", *keys, "rollout.max_tokens=200", *changes])
    if not shown:
        prompt_checks.check(config)
        return
    with pytest.raises(ConfigError, match=rf"^rollout\.format: (chat|think_answer) .*{shown}"):
        prompt_checks.check(config)
