"""Manual of an exported policy: chat template, generation settings and README of its directory.

A policy was trained and evaluated on turns that open with a forced prefix, behind one system
message, up to a stop string. The chat template, `generation_config.json` and `README.md` written
here let programs that know nothing of this package ask for the same turns.
"""

import asyncio
import json
import logging
import re
from pathlib import Path

from actors.envs.base import begun, make_env, one_line
from actors.formats.chat import TODAY, Chat
from actors.rollout.conversation import system_message, tools_of
from actors.rollout.episode_config import Setting, setting_of
from evolver_async.buffer.stages import source_of
from evolver_async.config import Config
from evolver_async.extension import RAISED
from evolver_async.files import parsed
from evolver_async.model.tokenizer import GENERATION, load_tokenizer
from evolver_async.schema import Task

log = logging.getLogger(__name__)
TEMPLATE = "chat_template.jinja"

# The rendering of `first`: the original template on the messages up to the first one of the user.
# What follows is written as `Chat.next` does: an original that rewrites earlier turns is not asked.
HEAD = (
    "{% set rest = messages[2:] if messages[0]['role'] == 'system' else messages[1:] %}"
    "{% set said = rest | selectattr('role', 'in', ['user', 'assistant']) | list %}"
    "{% set turns = rest if add_generation_prompt and said | length == rest | length else [] %}"
    "{% if turns %}{% set messages = messages[:-(turns | length)] %}{% endif %}"
    "{{ '' }}"
)
MARK = "{{ '' }}{# what evolver-async adds: turns as they were trained, the forced prefix #}"
TAIL = (
    f"{MARK}"
    "{% for turn in turns %}{% if turn['role'] == 'user' %}"
    "{{ BETWEEN + turn['content'] + OPENING }}{% else %}{{ turn['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ forced_prefix if forced_prefix is defined else PREFIX }}{% endif %}"
)
SWITCH = "{# rollout.template #}"  # behind a variable of the original that training set
SWITCHES = re.compile(rf"^(?:{{% set (?:(?!%}}).)* %}}{re.escape(SWITCH)})*", re.DOTALL)
# A call for the date in a template, which training answers with the same one on every day.
DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

README = '''# A policy trained with evolver_async

{summary}

## How a turn is written

{manner}

- `generation_config.json` ends a turn: {ends}. It sets no other limit than the model's context;
  training and evaluation cut a turn at {max_tokens} tokens, as the examples below do.
- Evaluation decodes {evaluated}; training sampled at temperature {temperature:g}.
- {context}
{prompt}
{conversations}
## With transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

PATH = "."  # this directory
PREFIX = {prefix}
MAX_TOKENS = {max_tokens}  # of a turn, as in training and evaluation
tokenizer = AutoTokenizer.from_pretrained(PATH)
model = AutoModelForCausalLM.from_pretrained(PATH)


def reply(messages):
    """Write the policy's next turn and append it to the conversation."""
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**asked, tokenizer=tokenizer, max_new_tokens=MAX_TOKENS)
    written = written[0, asked["input_ids"].shape[1] :]
    if int(written[-1]) in model.generation_config.eos_token_id:
        written = written[:-1]
    text = PREFIX + tokenizer.decode(written, clean_up_tokenization_spaces=False)
    messages.append({{"role": "assistant", "content": text}})
    return text
```

## With vLLM

`LLM(model=PATH).chat(messages, SamplingParams({sampling}))` writes the same turn; the message to
append is `PREFIX` and its text. A server of vLLM does not read `do_sample`: a request without a
temperature is sampled at 1, and one without `max_tokens` may fill the model's context.
'''


def write_manual(config: Config, directory: Path, examples: bool = False) -> None:
    """Write the chat template, generation settings and README of a stage's policy.

    `config` is that of the stage whose turns are described; `directory` holds the model and the
    tokenizer of the run. `examples`: the README may show a row of the stage's files.
    """
    chat = Chat(load_tokenizer(directory), config.rollout.template)
    setting = setting_of(config, chat, "export", 0)
    prefix = "" if config.rollout.agent else setting.format.prefix
    stops = () if config.rollout.agent else setting.format.stop_strings
    template = template_of(chat, prefix)
    (directory / TEMPLATE).write_text(template, encoding="utf-8")
    path = directory / GENERATION
    known = parsed(path.read_text(encoding="utf-8")) if path.is_file() else {}
    # Of the base only its special tokens: its penalties and sampling are not those of the policy.
    tokens = {name: value for name, value in known.items() if name.endswith("_token_id")}
    written = tokens | generation(config, chat, stops, context_of(directory))
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    text = readme(config, setting, prefix, stops, examples)
    (directory / "README.md").write_text(text, encoding="utf-8")


def template_of(chat: Chat, prefix: str) -> str:
    """Return the chat template of the run, whose generation prompt ends with `prefix`.

    The variable `forced_prefix` of the template replaces it. A template that was made here before
    is made anew out of the original in it. The date is that of training, not today's, and so are
    the switches (`rollout.template`) where a caller sets none.
    """
    original, tail = chat.template, TAIL
    if original.startswith(HEAD):
        original = SWITCHES.sub("", original.removeprefix(HEAD).rpartition(MARK)[0])
    original = DATE.sub(lambda call: json.dumps(TODAY.strftime(call[2])), original)
    for name, text in (("BETWEEN", chat.between), ("OPENING", chat.opening), ("PREFIX", prefix)):
        tail = tail.replace(name, json.dumps(text, ensure_ascii=False))
    switches = "".join(
        f"{{% set {name} = {name} if {name} is defined else {value!r} %}}{SWITCH}"
        for name, value in chat.switches.items()
    )
    return HEAD + switches + original.removesuffix("\n") + tail


def context_of(directory: Path) -> int | None:
    """Return the length of the model's context in tokens; None if its configuration has none."""
    path = directory / "config.json"
    known = parsed(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return known.get("text_config", known).get("max_position_embeddings")


def generation(
    config: Config, chat: Chat, stops: tuple[str, ...], context: int | None
) -> dict[str, object]:
    """Return the generation settings of the run's evaluation, but for its limit of tokens.

    That limit belongs to training: vLLM takes `max_new_tokens` of this file for the most that any
    request may have. Without a `max_length` transformers stops after 20 tokens. Fields that are not
    set are off in transformers and vLLM, except those set here.
    """
    temperature = config.eval.temperature
    settings: dict[str, object] = {
        "eos_token_id": sorted(chat.stop_tokens),
        "do_sample": temperature > 0,
        "repetition_penalty": 1.0,
    }
    if temperature > 0:
        settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings |= {"max_length": context} if context else {}
    return settings | ({"stop_strings": list(stops)} if stops else {})


def readme(
    config: Config, setting: Setting, prefix: str, stops: tuple[str, ...], examples: bool
) -> str:
    rollout, temperature = config.rollout, config.eval.temperature
    sampling = [f"temperature={temperature:g}", f"max_tokens={rollout.max_tokens}"]
    ends = "the end-of-turn token"
    if stops:
        sampling += [f"stop={list(stops)!r}", "include_stop_str_in_output=True"]
        ends = f"{' or '.join(f'`{text}`' for text in stops)}, which belongs to it, or {ends}"
    manner = "The chat template is the one that training used."
    if prefix:
        manner = (
            f"Every turn begins with `{prefix}`. The chat template writes it behind the generation"
            " prompt, so what is generated follows it. A turn in `messages` includes it."
        )
    if rollout.extract and not rollout.agent and setting.format_name == "chat":
        manner += (
            f" The action is not the whole message but `{rollout.extract}` of it"
            " (`rollout.extract`)."
        )
    if setting.format.inline and not rollout.agent:
        manner += (
            " What a tool returns stands in the same message, behind the turn: append it to the"
            " prompt's text, and generate again."
        )
    if setting.format_name == "native" and not rollout.agent:
        manner += (
            " The environment's tools are its `tools`, calls are written as it writes them, and"
            " each result is a message of the role `tool`; a message without a call is the answer."
        )
    agent = f"The agent `{rollout.agent}` wrote its conversations itself." if rollout.agent else ""
    contexts = {
        "full": "A turn sees the whole conversation.",
        "window": f"A turn sees the first prompt and the last {rollout.window} turns; where turns"
        " are left out, the first message ends with `...` and the observation before the rest.",
        "single": "A turn sees the system message and the present observation, nothing before it.",
    }
    wording = f"- The system message is in the wording `env.prompt: {setting.wording}`.\n"
    return README.format(
        summary=f"Run `{config.run.name}`, environment `{config.env.name}`.",
        manner=manner,
        ends=ends,
        max_tokens=rollout.max_tokens,
        evaluated=f"at temperature {temperature:g}" if temperature else "greedily",
        temperature=rollout.temperature,
        context=agent or contexts[rollout.context],
        prompt="" if rollout.agent else wording,
        conversations="" if rollout.agent else conversations(config, setting, examples),
        prefix=json.dumps(prefix, ensure_ascii=False),
        sampling=", ".join(sampling),
    )


def conversations(config: Config, setting: Setting, examples: bool) -> str:
    """Describe the beginning of an episode, once an environment.

    Rows of files belong to their authors, so none is copied unless `examples` is set: only the
    system message is shown. An environment that cannot begin an episode here (a service may be
    down) does not stop the export.
    """
    source = source_of(config)
    tasks = dict[str, Task | None]()
    if source.given is not None and not examples:
        tasks = dict.fromkeys(sorted(source.given.envs))
    else:
        for task in source.examples():
            tasks.setdefault(task.env, task)
    parts = []
    for name, task in tasks.items():
        try:
            if task is None:
                params = config.env.params if name == config.env.name else {}
                env = make_env(name, params)
                said = system_message(setting, env, asyncio.run(tools_of(setting, env)))
                shown = [("system", said)] if said else []
            else:
                shown = asyncio.run(beginning(setting, task))
        except RAISED as error:
            said = one_line(error)
            log.warning("README: %s cannot begin a task: %s", name, said)
            parts.append(f"The environment `{name}` could not begin a task here: {said}\n")
            continue
        parts.append(_section(name, shown, task is None))
    return "\n".join(parts)


def _section(name: str, shown: list[tuple[str, str]], hidden: bool) -> str:
    """Write the section of an environment: first messages, or that its rows are not shown."""
    absent = "There is no system message: the template's own default acts, if it has one.\n\n"
    described = "" if shown[:1] and shown[0][0] == "system" else absent
    for number, (role, text) in enumerate(shown):
        which = "System" if role == "system" else ("First" if number < 2 else "Next")
        of = {"system": "message", "user": "message of the user, for one task"}
        said = of.get(role, "message of the assistant, which the task gives")
        described += f"{which} {said}:\n\n{_fenced(text)}\n\n"
    if hidden:
        described += (
            "Then follow the messages of a task. The tasks were rows of files, none of which is"
            " copied here (`evolver-async export --examples` shows one).\n\n"
        )
    return (
        f"## How an episode of `{name}` begins\n\n{described}"
        "Every observation after it is a message of the user by itself.\n"
    )


async def beginning(setting: Setting, task: Task) -> list[tuple[str, str]]:
    """Return roles and texts of the first messages in an episode of `task`."""
    async with begun(task) as (env, opening):
        specs = await tools_of(setting, env)
        system = opening.under(system_message(setting, env, specs))
        return setting.chat.opening_messages(system, opening.user, opening.before)


def _fenced(text: str) -> str:
    """Put `text` in a Markdown block whose fence it does not contain."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
