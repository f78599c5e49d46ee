"""An export tells how its policy is asked: with transformers alone it says what it said here."""

import json
import re
from pathlib import Path

import pytest
from chatml import TEMPLATE, make_tokenizer
from exported import EPISODES, Exported, make_export, play
from transformers import AutoTokenizer, GenerationConfig

from actors.export_manual import template_of, write_manual
from actors.formats.chat import TODAY, Chat
from evolver_async.config.load import load, stage_config
from evolver_async.env import Info, Step
from evolver_async.schema import Task

DATED = (
    """{% if strftime_now is defined %}{% set day = strftime_now("%d %b %Y") %}{% endif %}
Today is {{ day }}, {{ strftime_now( '%Y-%m-%d' ) }}.
"""
    + TEMPLATE
)
FORGETFUL = """
{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'assistant' and not loop.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class Awaited:
    """An environment whose calls are awaited."""

    instructions = "wait"

    async def reset(self, task: Task, dynamics_seed: int) -> str:
        return "the beginning"

    async def step(self, action: str) -> Step:
        return Step("over", 1.0, True, False, Info(success=True))

    async def close(self) -> None:
        pass


STEPS = "stages=[{kind: rl, steps: 1}]"

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_export(tmp_path_factory.mktemp("exported"))


def test_plain_transformers_writes_every_turn_of_the_evaluation(exported: Exported) -> None:
    """By the very example of the README."""
    text = (exported.directory / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(example.replace('PATH = "."', f"PATH = {str(exported.directory)!r}"), names)
    found = [play(exported, number, names["reply"]) for number in range(EPISODES)]
    assert [texts for texts, _ in found] == exported.texts
    assert [success for _, success in found] == exported.success
    assert sum(exported.success) > 0, "the policy must not be too bad to show anything"
    assert max(map(len, exported.texts)) > 1, "nor may every episode be a single turn"


def test_the_readme_tells_what_a_turn_needs(exported: Exported) -> None:
    text = (exported.directory / "README.md").read_text()
    for told in (
        *("Every turn begins with `<answer>`", "`</answer>`", "at 12 tokens", "greedily"),
        *("reply with <answer> action</answer>", "stop=['</answer>']", "whole conversation"),
    ):
        assert told in text, told


def test_the_generation_settings_are_valid_and_those_of_the_evaluation(exported: Exported) -> None:
    settings = GenerationConfig.from_pretrained(exported.directory)
    settings.validate(strict=True)
    assert settings.stop_strings == ["</answer>"]
    assert not settings.do_sample
    assert settings.eos_token_id == sorted(exported.setting.chat.stop_tokens)


def test_the_limits_of_training_do_not_cut_what_an_export_serves(exported: Exported) -> None:
    """vLLM caps every request at `max_new_tokens`; transformers stops at 20 without any limit."""
    settings = json.loads((exported.directory / "generation_config.json").read_text())
    model = json.loads((exported.directory / "config.json").read_text())
    assert "max_new_tokens" not in settings
    assert settings["max_length"] == model["max_position_embeddings"]


def test_weights_have_the_mode_of_the_other_files(exported: Exported) -> None:
    modes = {path.name: path.stat().st_mode for path in exported.directory.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes
    assert "model.safetensors" in modes


@pytest.mark.parametrize("prompts", [True, False])
def test_the_readme_copies_rows_only_if_asked_and_one_an_environment(
    tmp_path: Path, prompts: bool
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    rows = [
        {"question": f"SECRET {n}", "answer": "1"}
        if prompts
        else {
            "env": ("frozen_lake", "sokoban")[n % 2],
            "seed": n,
            "id": f"t{n}",
            "query": f"SECRET {n}",
        }
        for n in range(300)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f"tasks.path={tmp_path / 'rows.jsonl'}", "rollout.system_prompt=GUIDE"]
    if prompts:
        changes += ["env.name=prompts", "tasks.prompt=question", "tasks.answer=answer"]
    config = stage_config(load(None, [STEPS, *changes]), 0)
    envs = 1 if prompts else 2
    for examples, copied in ((False, 0), (True, envs)):
        write_manual(config, tmp_path, examples)
        text = (tmp_path / "README.md").read_text()
        assert text.count("SECRET") == copied and "GUIDE" in text
        assert text.count("## How an episode of") == envs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_of_the_bases_sampling_stays(tmp_path, temperature: float) -> None:
    """Penalties and cuts of the base would make another policy of the exported one."""
    make_tokenizer().save_pretrained(tmp_path)
    base = {
        "bos_token_id": 1,
        "pad_token_id": 2,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "suppress_tokens": [7],
        "bad_words_ids": [[9]],
        "num_beams": 4,
        "max_length": 20,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(base))
    write_manual(stage_config(load(None, [STEPS, f"eval.temperature={temperature}"]), 0), tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert (written.pop("bos_token_id"), written.pop("pad_token_id")) == (1, 2)
    own = {"eos_token_id", "do_sample", "stop_strings"}
    neutral = {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0, "temperature": temperature}
    assert written.items() <= ({name: written[name] for name in own} | neutral).items()
    settings = GenerationConfig.from_pretrained(tmp_path)
    settings.validate(strict=True)
    assert settings.do_sample == (temperature > 0)


def test_an_evaluation_that_samples_does_so_from_all_tokens(exported: Exported, tmp_path) -> None:
    for path in exported.directory.glob("token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(exported.setting.chat.template)
    changes = ["eval.temperature=0.7", "rollout.format=tool_call", "env.name=code"]
    write_manual(stage_config(load(None, [STEPS, *changes]), 0), tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (0.7, 0, 1.0)
    assert settings["stop_strings"] == ["</answer>", "</tool_call>"]
    assert '"name": "python"' in (tmp_path / "README.md").read_text(), "the tools are told"


def test_the_readme_tells_how_an_episode_of_an_async_environment_begins(tmp_path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    changes = [f"env.name={__name__}:Awaited"]
    write_manual(stage_config(load(None, [STEPS, *changes]), 0), tmp_path)
    assert "the beginning" in (tmp_path / "README.md").read_text()


def test_the_readme_tells_the_wording_and_the_system_prompt_of_the_run(tmp_path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    changes = ["env.prompt=plain", "rollout.system_prompt=Answer in <answer> tags."]
    write_manual(stage_config(load(None, [STEPS, *changes]), 0), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "`env.prompt: plain`" in text and "You are walking over a frozen lake." in text
    assert "Answer in <answer> tags." in text and "Reply with exactly" not in text


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE + "\n", FORGETFUL, DATED])
@pytest.mark.parametrize("prefix", ["", "<think>", 'a "quoted" \\ ö\n'])
def test_the_template_writes_conversations_as_training_does(template: str, prefix: str) -> None:
    """Also where the original forgets the thoughts of earlier turns."""
    tokenizer = make_tokenizer(template)
    chat = Chat(tokenizer)
    said = [f"{prefix}why</think><answer>{n}</answer>" for n in range(2)]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u0"}]
    tokens = chat.first("s", "u0", prefix)
    other = make_tokenizer(template_of(chat, prefix))

    def rendered(**options) -> str:
        return other.apply_chat_template(messages, tokenize=False, **options)

    assert rendered(add_generation_prompt=True) == tokenizer.decode(tokens)
    for n, text in enumerate(said):
        messages += [{"role": "assistant", "content": text}]
        messages += [{"role": "user", "content": f"u{n + 1}"}]
        tokens += chat.tokens_of(text.removeprefix(prefix)) + chat.next(f"u{n + 1}", prefix, None)
        assert rendered(add_generation_prompt=True) == tokenizer.decode(tokens)
    plain = tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=TODAY.strftime)
    assert rendered() == plain, "without a generation prompt it is the original"


def test_an_exported_template_can_be_trained_on_again(exported: Exported) -> None:
    """The export is a policy like any other: its turns open with the prefix once, or with
    another one."""
    chat = Chat(AutoTokenizer.from_pretrained(exported.directory))
    for prefix in ("<answer>", "<think>"):
        assert chat.first("s", "u", prefix) == exported.setting.chat.first("s", "u", prefix)
    assert template_of(chat, "<think>") == template_of(exported.setting.chat, "<think>")


def test_the_template_keeps_the_switches_of_training() -> None:
    thinks = "{% if thinks is defined and not thinks %}</think>{% endif %}{{ word }}"
    tokenizer = make_tokenizer(
        TEMPLATE.replace("assistant\n{% endif", f"assistant\n{thinks}{{% endif")
    )
    chat = Chat(tokenizer, {"thinks": False, "word": "say 'a' %"})
    other = make_tokenizer(template_of(chat, ""))
    messages = [{"role": "user", "content": "u"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    rendered = other.apply_chat_template(messages, **options)
    assert rendered == tokenizer.decode(chat.first("", "u", ""))
    assert rendered.endswith("</think>say 'a' %")
    again = Chat(other, {"thinks": False, "word": "say 'a' %"})
    assert template_of(again, "") == template_of(chat, "")
    assert "</think>" in chat.opening
