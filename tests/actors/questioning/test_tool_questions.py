"""Self-Questioning where actions are calls of tools or code, and by profiles of the model's own."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from env_service import AppWorldService
from families import family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from openai_server import Answer, OpenAIServer, status
from questions import (
    CHAT,
    Wanderer,
    config_of,
    explore_ticket,
    llm,
    proposal,
    run,
    verdict,
)

from actors.checks.config import check
from actors.envs.base import Probed, make_env
from actors.formats.chat import Chat
from actors.formats.tool_calls import ANSWER_TOOL, CODE_TOOL, canonical, tool_spec
from actors.formats.turns import turn_format
from actors.llm.json_client import QUESTION_CHARS, TEXT_CHARS, truncate
from actors.questioning.actions import ActionForm
from actors.questioning.explore import parse_choice, turn_of
from actors.questioning.grade import regrade
from actors.questioning.profile import parse_summary
from actors.questioning.questioner import make_questioner
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.ticket_progress import TicketProgress
from evolver_async.config import Config, ablation
from evolver_async.config.load import load, stage_config
from evolver_async.schema import Task, Trajectory

ROOT = Path(__file__).parents[3]

LOOK = {"name": "look_up", "arguments": {"service": "harbour_restaurant"}}
LIST: dict[str, Any] = {"name": "list_services", "arguments": {}}
CODE = "# " + "a comment " * 30 + "\nfor word in ('a || b', 'c'):\n    print(word)"
PROFILE = {
    "name": "a town",
    "background": "Services that are booked.",
    "entities": [{"name": "service", "operations": [{"name": "look_up", "description": "reads"}]}],
}


def call(action: dict[str, Any]) -> str:
    return canonical(action["name"], action["arguments"])


def program(code: str) -> dict[str, Any]:
    return {"name": CODE_TOOL, "arguments": {"code": code}}


def answered(text: str) -> dict[str, Any]:
    return {"name": ANSWER_TOOL, "arguments": {"text": text}}


def talk(
    *proposals: Any,
    actions: tuple[Any, ...],
    profile: Any = None,
    obeys: Callable[[str], bool] = lambda task: True,
    solution: tuple[Any, ...] = (),
) -> Answer:
    """Answer whoever asks: for a profile, an action, tasks, a comparison, a solution or a grade."""
    asked = {"explore": 0}

    def reply(body: dict[str, Any]) -> str:
        system, question = (message["content"] for message in body["messages"][:2])
        if "You describe" in system:
            return json.dumps(profile)
        if "You compare" in system:
            return json.dumps({"obeys": obeys(question)})
        if "You set tasks" in system:
            return json.dumps(proposals)
        if "You grade" in system:
            return verdict(90)
        if "You solve" in system:
            return json.dumps({"action": [*solution, ""][len(json.loads(question)["so far"])]})
        asked["explore"] += 1
        return json.dumps({"action": actions[(asked["explore"] - 1) % len(actions)]})

    return reply


def town(server: OpenAIServer, style: str = "tool_call", **keys: Any) -> Config:
    config = config_of("bookings", kind="llm", llm=llm(server), **{"max_turns": 3, **keys})
    config.rollout.format = style
    config.rollout.max_tokens = 512
    config.policy.max_length = 16384
    return config


def tasks_of(config: Config, chat: Chat = CHAT, tickets: int = 1) -> tuple[list[Task], Any]:
    each = [explore_ticket(config, number, members=1, group_id=number) for number in range(tickets)]
    found, counted = run(config, each, chat=chat)
    return [task for tasks in found for task in tasks], counted


@pytest.mark.parametrize(
    ("style", "chat"),
    [
        ("tool_call", CHAT),
        ("native", Chat(family_tokenizer("qwen2_5"))),
        ("native", Chat(family_tokenizer("qwen3_5"))),
        ("native", Chat(family_tokenizer("gpt_oss"))),
    ],
    ids=["tool_call", "hermes", "qwen3_5", "harmony"],
)
def test_tasks_are_found_by_calls_of_tools_and_solved_by_some(style: str, chat: Chat) -> None:
    refused = {
        "name": "book",
        "arguments": {"service": "harbour_restaurant", "customer": "", "date": "", "duration": 1},
    }
    told = [
        proposal("tell what the harbour restaurant offers", [LIST, call(LOOK)]),
        proposal("rob every service in town", [{"name": "rob", "arguments": {}}], 0.8),
        proposal("book something somehow", [refused], 0.7),
    ]
    unknown = {"name": "rob", "arguments": {}}
    with OpenAIServer(otherwise=talk(*told, actions=(unknown, LIST, LOOK, LOOK))) as server:
        config = town(server, style)
        check(config)
        found, counted = tasks_of(config, chat)
    (task,) = found
    assert task.reference == [call(LIST), call(LOOK)] and task.origin == "synthetic"
    assert counted["questioning/dropped_infeasible"] == 2, "a call that fails solves nothing"
    assert counted["questioning/malformed"] == 1, "a tool that is not there is asked for again"
    first, again, second, third, asked = (one.body["messages"] for one in server.calls)
    for messages in (first, asked):
        assert all(name in messages[1]["content"] for name in ("list_services", '"duration"'))
    assert "'rob'" in again[-1]["content"]
    assert "services: " in second[1]["content"] and "It offers" not in second[1]["content"]
    assert "writes a customer" in third[1]["content"]
    record = json.loads(asked[1]["content"].rpartition("\n\n")[2])
    assert len(record["explored"]) == 3 and "look_up" in record["explored"][-1]["did"]


def test_the_policys_own_calls_lead_to_goals() -> None:
    config = config_of("workshop_tools", {"fatal": False}, max_turns=30)
    config.rollout.format, config.rollout.max_tokens = "tool_call", 128
    written = '<tool_call>{"name": "work", "arguments": {"action": "{}"}}</tool_call>'
    engine = Wanderer(("push", "pull", "pick", "place"), written)
    ((found,), _) = run(config, [explore_ticket(config, members=2)], engine)
    assert {task.params["until"] for task in found} == {1, 2, 3}
    for task in found:
        env = make_env(task.env, task.params)
        env.reset(task, 0)
        assert [env.step(action) for action in task.reference or []][-1].info.success


@pytest.mark.process
def test_code_of_many_lines_is_explored_with_and_solves_tasks() -> None:
    failing = f"{CODE}\nraise ValueError"
    told = [
        proposal("print the words", [program(CODE), answered("c")]),
        proposal("end in an error", [program(failing)], 0.8),
    ]
    with OpenAIServer(otherwise=talk(*told, actions=(program(CODE),))) as server:
        config = config_of("code", kind="llm", max_turns=2, llm=llm(server), replays_kept=1)
        config.rollout.format, config.rollout.max_tokens = "interleaved", 1024
        check(config)
        found, counted = tasks_of(config)
    (task,) = found
    assert task.reference == [call(program(CODE)), call(answered("c"))]
    assert counted["questioning/dropped_infeasible"] == 1
    (record,) = (
        json.loads(one.body["messages"][1]["content"].rpartition("\n\n")[2])
        for one in server.calls
        if "You set tasks" in one.body["messages"][0]["content"]
    )
    assert [one["saw"] for one in record["explored"]] == ["a || b\nc"] * 2
    assert CODE in record["explored"][0]["did"]


@pytest.mark.parametrize(
    "action",
    [
        "print(1)",
        program("x" * 500),
        program(""),
        {"name": CODE_TOOL, "arguments": {}},
        {"name": CODE_TOOL, "arguments": "[1]"},
        {"name": "walk", "arguments": {}},
        {"arguments": {}},
        7,
    ],
)
def test_an_action_that_no_turn_can_make_is_refused(action: Any) -> None:
    form = ActionForm([tool_spec(CODE_TOOL, "runs", "code")])
    style = turn_format("interleaved", think=False, actions_per_turn=1)

    def written(action: Any) -> str:
        chosen = parse_choice(json.dumps({"action": action}), form)
        form.check_tool(chosen)
        return turn_of(chosen, form, style, CHAT, 400)[0]

    assert written(program("print(1)\n")) == call(program("print(1)"))
    with pytest.raises(ValueError):
        written(action)


def test_texts_stay_on_a_line_and_are_no_calls() -> None:
    form, style = ActionForm(), turn_format("think_answer", think=False, actions_per_turn=2)
    assert parse_choice('{"action": " look "}', form) == "look"
    for action in ("a\nb", "x" * 201, LIST):
        with pytest.raises(ValueError):
            parse_choice(json.dumps({"action": action}), form)
    assert turn_of("look", form, style, CHAT, 64)[0] == "look"
    for action in ("look || buy", "<b>"):  # two actions, and none
        with pytest.raises(ValueError):
            turn_of(action, form, style, CHAT, 64)


def test_a_task_of_calls_is_solved_again_with_an_answer() -> None:
    told = proposal("tell what the harbour restaurant offers", [LIST, LOOK])
    answer = talk(told, actions=(LIST,), solution=(LOOK,))
    with OpenAIServer(otherwise=answer) as server:
        found, _ = tasks_of(town(server, max_turns=2, resolve=True))
    (task,) = found
    assert task.reference == [call(LOOK)]
    (system, question), *_ = (
        [message["content"] for message in one.body["messages"]]
        for one in server.calls
        if "You solve" in one.body["messages"][0]["content"]
    )
    assert ANSWER_TOOL in system
    record = json.loads(question)
    assert record["hint"] == [call(LIST), call(LOOK)]
    assert [tool["name"] for tool in record["tools"]] == ["list_services", "look_up", "book"]


# ---- the recipe of AppWorld, over AgentEvolver's protocol

LOGIN = """accounts = apis.supervisor.show_account_passwords()
token = apis.music.login(accounts[0]['password'])
for playlist in apis.music.show_playlists(token):
    print(playlist)"""
LATER = LOGIN.replace("print(playlist)", "last = playlist\napis.supervisor.complete_task(last)")
BY_HEART = "print(apis.music.login('secret-2'))"


def test_the_recipe_of_appworld_finds_programs_over_the_protocol_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLM_KEY", "key")
    told = [
        proposal("name the last playlist of the supervisor", [program(LOGIN), program(LATER)]),
        proposal("log in with a password known by heart", [program(BY_HEART)], 0.8),
    ]
    usual = talk(*told, actions=(program(LOGIN),), profile=PROFILE, solution=(program(LATER),))
    assert callable(usual)
    graded: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> Any:
        if "You grade" not in body["messages"][0]["content"]:
            return usual(body)
        graded.append(json.loads(body["messages"][1]["content"]))
        return verdict(90 if "last playlist" in graded[-1]["task"] else 10)

    chat = Chat(family_tokenizer("qwen2_5"))
    with OpenAIServer(otherwise=reply) as server, AppWorldService() as service:
        urls = [f"env.params.url={service.url}", f"questioning.llm.url={server.url}"]
        config = load(ROOT / "configs" / "gpu" / "agentevolver_appworld.yaml", urls)
        assert config.experience.keep_copied and config.rollout.format == "native"
        env = make_env(config.env.name, config.env.params)
        assert isinstance(env, Probed)
        env.probe()
        config.questioning.max_turns = 3
        found, counted = tasks_of(config, chat)
        (task,) = found
        finished = asyncio.run(played(config, chat, task))
        assert not service.instances, "every instance was given back"
    assert task.reference == [call(program(LATER))] and task.env == "agentevolver_code"
    assert counted["questioning/dropped_unsolved"] == 1
    sent = {
        name: [body for call, body in service.calls if call == name] for name in ("create", "step")
    }
    explored, *others = [body["params"].get("is_open_query") for body in sent["create"]]
    assert explored is None and all(others), "a task of its own making replaces the service's"
    assert sent["step"][0]["messages"]["content"] == f"```python\n{LOGIN}\n```"
    beginnings = [
        json.loads(one.body["messages"][1]["content"].rpartition("\n\n")[2])["beginning"]
        for one in server.calls
        if "You explore" in one.body["messages"][0]["content"]
    ]
    assert beginnings[0] == "How many playlists have I got?"
    assert graded[-1]["reference"] == task.reference == [call(program(LATER))]
    assert call(program(LATER)) in graded[-1]["agent"][0]["did"]
    assert finished.success and finished.reward == 0.9, "whatever the service's own task is worth"


async def played(config: Config, chat: Chat, task: Task) -> Trajectory:
    """The policy's episode of a task, graded as that of a rollout is."""
    ticket = msgspec.structs.replace(
        explore_ticket(config, members=1), kind="rollout", task=task, guided=[]
    )
    finished: list[Finished] = []
    setting = setting_of(config, chat, "actor-0", 0)
    style = turn_format("native", think=False, actions_per_turn=1, chat=chat)
    engine = Wanderer((style.render_actions([(task.reference or [""])[-1]]),), "{}", chat)
    await run_group(ticket, setting, engine, TicketProgress(), finished.append)
    questioner = make_questioner(config)
    assert questioner is not None and questioner.grades(task)
    (one,) = finished
    given = await questioner.grade(task, one.transcript.turns, one.ending)
    assert given is not None
    regrade(one.trajectory, given)
    await questioner.close()
    return one.trajectory


# ---- profiles of the model's own, and tasks that obey one


def described(server: OpenAIServer) -> list[str]:
    """The first lines of what explorers and setters of tasks were told."""
    known = ("You explore", "You set tasks")
    bodies = (one.body["messages"] for one in server.calls)
    return [b[1]["content"].split("\n")[0] for b in bodies if b[0]["content"].startswith(known)]


def test_the_model_makes_one_profile_of_what_an_agent_is_shown() -> None:
    told = proposal("tell what the harbour restaurant offers", [LOOK])
    with OpenAIServer(otherwise=talk(told, actions=(LIST,), profile=PROFILE)) as server:
        config = town(server, max_turns=1, profile="auto")
        check(config)
        found, _ = tasks_of(config, tickets=2)
    assert len(found) == 2 and described(server) == ["Environment: a town"] * 4
    first, *others = (one.body["messages"] for one in server.calls)
    assert "You describe" in first[0]["content"]
    assert not any("You describe" in one[0]["content"] for one in others)
    record = json.loads(first[1]["content"])
    assert "conventions" in record["instructions"] and record["beginning"].startswith("Book ")
    assert record["tools"][0]["name"] == "list_services"
    assert "list_services" in others[0][1]["content"], "calls need the tools as well"


@pytest.mark.parametrize("outage", [True, False])
def test_without_a_readable_profile_the_instructions_describe(outage: bool) -> None:
    usual, asked = talk(actions=(LIST,)), {"profile": 0}
    assert callable(usual)

    def reply(body: dict[str, Any]) -> Any:
        if "You describe" not in body["messages"][0]["content"]:
            return usual(body)
        asked["profile"] += 1
        return status(400) if outage else "it is nice there"

    with OpenAIServer(otherwise=reply) as server:
        found, counted = tasks_of(town(server, max_turns=1, profile="auto"), tickets=2)
    assert found == [] and len(described(server)) == 4
    assert all(line.startswith("You book services") for line in described(server))
    if outage:
        assert counted["questioning/outages"] == asked["profile"] == 4, "it is asked again"
    else:
        assert asked["profile"] == 2, "two attempts, once"


def test_a_profile_of_the_model_is_short_and_prefers_the_usual_tasks() -> None:
    own = PROFILE | {"preference": {"entities": 9, "operations": 9, "difficulty": 3}}
    assert parse_summary(json.dumps(own)) == parse_summary(json.dumps(PROFILE))
    for wrong in (PROFILE | {"background": "x" * 9000}, {"background": "x"}, []):
        with pytest.raises(ValueError):
            parse_summary(json.dumps(wrong))


def test_tasks_that_do_not_obey_the_profile_are_dropped() -> None:
    told = [
        proposal("tell what the harbour restaurant offers", [LOOK]),
        proposal("name all services of this town", [LIST], 0.8),
    ]
    answer = talk(*told, actions=(LIST,), profile=PROFILE, obeys=lambda asked: "harbour" in asked)
    with OpenAIServer(otherwise=answer) as server:
        config = town(server, max_turns=1, profile="auto", obeys_profile=True)
        (task,), counted = tasks_of(config)
    assert task.query == "tell what the harbour restaurant offers"
    assert counted["questioning/dropped_profile"] == 1
    (question, _) = (
        one.body["messages"][1]["content"]
        for one in server.calls
        if "You compare" in one.body["messages"][0]["content"]
    )
    assert question.startswith("Environment: a town")
    record = json.loads(question.rpartition("\n\n")[2])
    assert record == {"task": told[0]["query"], "reference": [call(LOOK)]}


def test_an_outage_lets_no_task_pass_the_profile() -> None:
    usual = talk(proposal("look it up", [LOOK]), actions=(LIST,), profile=PROFILE)
    assert callable(usual)

    def reply(body: dict[str, Any]) -> Any:
        return status(400) if "You compare" in body["messages"][0]["content"] else usual(body)

    with OpenAIServer(otherwise=reply) as server:
        config = town(server, max_turns=1, profile="auto", obeys_profile=True)
        found, counted = tasks_of(config)
    assert found == [] and counted["questioning/dropped_profile"] == 1
    assert counted["questioning/outages"] == 1


def test_a_filter_by_profile_is_inert_without_one() -> None:
    keys = ["stages=[{kind: rl, steps: 1}]", "tasks.synthetic=0.5"]
    endpoint = "{url: 'http://localhost:1/v1', model: m}"
    for kind in (f"kind: llm, llm: {endpoint}", "kind: goals"):
        config = load(None, [*keys, f"questioning={{{kind}, obeys_profile: true}}"])
        (line,) = ablation.lines(config)
        assert line.startswith("inert: questioning.obeys_profile (questioning.")
        assert not stage_config(config, 0).questioning.obeys_profile


@given(st.lists(st.integers(0, 5000), max_size=80))
def test_only_the_longest_texts_of_a_question_are_cut(lengths: list[int]) -> None:
    """Code is long and answers to it are short, or the other way round."""
    cut = [len(text.removesuffix(" …")) for text in truncate(["x" * length for length in lengths])]
    limit = max(
        (after for before, after in zip(lengths, cut, strict=True) if after < before), default=0
    )
    assert sum(cut) <= QUESTION_CHARS
    for before, after in zip(lengths, cut, strict=True):
        assert after == (before if not limit else min(before, limit))
    if 0 < limit < TEXT_CHARS:
        assert QUESTION_CHARS - sum(cut) < len(lengths), (
            "room is left for no further character each"
        )
