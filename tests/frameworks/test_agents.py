"""Agents of real packages against the endpoint, as `docs/frameworks.md` shows them.

The engine says a script, so that each agent calls its tool and answers; every context that the
policy saw must be the beginning of a trained sequence. `make test-frameworks` installs the
packages beside those of the project.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from random_policy import model_of, play
from scripted_agents import Client, Said, Scripted, run

LONG = {"max_turns": 20, "max_length": 1 << 16, "episode_timeout_s": 300.0}
Play = Callable[[str, str], Awaitable[float]]


def look(where: str) -> str:
    """Look somewhere.

    Args:
        where: the place
    """
    return f"nothing {where}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{rest(name, **arguments)}"


def rest(name: str, **arguments: Any) -> str:
    """What is sampled of a call that is forced, whose beginning is given."""
    return json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def plays(agent: Play, *said: Said) -> int:
    """Play one episode to its success; return the number of its trained sequences."""
    engine = Scripted(*said)

    async def player(client: Client) -> float:
        return await agent(str(client.base_url).rstrip("/"), client.api_key)

    trajectory = run(player, engine, max_tokens=1000, **LONG).one
    assert trajectory.reward == 1.0
    assert len(engine.requests) == len(said), "all of the script was asked for"
    sequences = [sequence.tokens.tolist() for sequence in trajectory.sequences]
    for request in engine.requests:
        assert request.tokens in [tokens[: len(request.tokens)] for tokens in sequences]
    return len(sequences)


TWICE = call("look", where="left"), "so " + call("look", where="right"), "gold"


@pytest.mark.parametrize("way", ["whole", "streamed", "by id"])
def test_the_agents_sdk_plays_by_default(way: str) -> None:
    agents = pytest.importorskip("agents")

    async def play(url: str, key: str) -> float:
        model = agents.OpenAIResponsesModel("policy", Client(base_url=url, api_key=key))
        tool = agents.function_tool(look)
        agent = agents.Agent(name="a", instructions="be brief", tools=[tool], model=model)
        options: dict[str, Any] = {"run_config": agents.RunConfig(tracing_disabled=True)}
        if way == "streamed":
            result = agents.Runner.run_streamed(agent, "find it", **options)
            async for _ in result.stream_events():
                pass
        else:
            options |= {"auto_previous_response_id": way == "by id"}
            result = await agents.Runner.run(agent, "find it", **options)
        return float("gold" in result.final_output)

    assert plays(play, *TWICE) == 1


def test_the_agents_sdk_hands_over_to_another_agent() -> None:
    agents = pytest.importorskip("agents")

    async def play(url: str, key: str) -> float:
        model = agents.OpenAIResponsesModel("policy", Client(base_url=url, api_key=key))
        other = agents.Agent(name="b", instructions="you are b", model=model)
        first = agents.Agent(name="a", instructions="be brief", handoffs=[other], model=model)
        config = agents.RunConfig(tracing_disabled=True)
        result = await agents.Runner.run(first, "find it", run_config=config)
        return float("gold" in result.final_output)

    assert plays(play, call("transfer_to_b"), "gold") == 2


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai_returns_typed_outputs(api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel

    class Answer(BaseModel):
        place: str
        sure: bool

    def model(url: str, key: str) -> Any:
        if api == "messages":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key=key)
            return AnthropicModel("policy", provider=provider)
        from pydantic_ai.models import openai
        from pydantic_ai.providers.openai import OpenAIProvider

        made = openai.OpenAIChatModel if api == "chat" else openai.OpenAIResponsesModel
        return made("policy", provider=OpenAIProvider(base_url=url, api_key=key))

    async def play(url: str, key: str) -> float:
        agent = pydantic_ai.Agent(model(url, key), output_type=Answer, tools=[look])
        result = await agent.run("find it")
        return float(result.output.place == "left")

    said = rest("look", where="left"), rest("final_result", place="left", sure=True)
    assert plays(play, *said) == 1


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_structured_outputs_of_a_random_policy_are_valid(api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    langchain = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel, Field
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        """Where it is."""

        side: Literal["left", "right"]

    class Answer(BaseModel):
        """The answer."""

        place: Place
        sure: bool
        steps: int = Field(ge=0, le=99)
        notes: list[Literal["a", "b"]] = Field(max_length=2)

    heard: list[Any] = []

    async def player(client: Client) -> float:
        url, key = str(client.base_url).rstrip("/"), client.api_key
        made = openai.OpenAIChatModel if api == "chat" else openai.OpenAIResponsesModel
        model = made("policy", provider=OpenAIProvider(base_url=url, api_key=key))
        agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Answer), retries=0)
        heard.append((await agent.run("find it")).output)
        responses = {"use_responses_api": api == "responses"}
        chat = langchain.ChatOpenAI(model="policy", base_url=url, api_key=key, **responses)
        heard.append(await chat.with_structured_output(Answer).ainvoke("find it"))
        return 1.0

    ran = play(player, model_of(), max_tokens=200, **LONG)
    assert [type(one) for one in heard] == [Answer, Answer]
    assert sum(len(grammar.turns) for grammar in ran.one.grammars) == len(ran.one.turn_flags) == 2


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langgraph_calls_tools(api: str) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt")

    async def play(url: str, key: str) -> float:
        if api == "messages":
            from langchain_anthropic import ChatAnthropic

            model = ChatAnthropic(model="policy", base_url=url.removesuffix("/v1"), api_key=key)
        else:
            from langchain_openai import ChatOpenAI

            responses = api == "responses"
            model = ChatOpenAI(
                model="policy", base_url=url, api_key=key, use_responses_api=responses
            )
        graph = prebuilt.create_react_agent(model, [look])
        result = await graph.ainvoke({"messages": [("user", "find it")]})
        return float("gold" in str(result["messages"][-1].content))

    both = "so " + call("look", where="right") + call("look", where="up")
    assert plays(play, call("look", where="left"), both, "gold") == 1


def test_langchain_returns_structured_output() -> None:
    langchain = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel

    class Answer(BaseModel):
        """The answer."""

        place: str

    async def play(url: str, key: str) -> float:
        model = langchain.ChatOpenAI(model="policy", base_url=url, api_key=key)
        answers = model.with_structured_output(Answer, method="function_calling")
        return float((await answers.ainvoke("find it")).place == "left")

    assert plays(play, ' {"place": "left"}}\n</tool_call>') == 1


@pytest.mark.parametrize("kind", ["ToolCallingAgent", "CodeAgent"])
def test_smolagents_plays_a_sequence_for_each_step(kind: str) -> None:
    smolagents = pytest.importorskip("smolagents")

    async def play(url: str, key: str) -> float:
        model = smolagents.OpenAIServerModel("policy", api_base=url, api_key=key)
        made = getattr(smolagents, kind)
        agent = made(tools=[smolagents.tool(look)], model=model, max_steps=4, verbosity_level=0)
        return float("gold" in str(await asyncio.to_thread(agent.run, "find it")))

    code = "Thought: {}\n<code>\n{}\n</code>"
    said = {
        "ToolCallingAgent": (rest("look", where="left"), rest("final_answer", answer="gold")),
        "CodeAgent": (
            code.format("a", "x = look('left')\nprint(x)"),
            code.format("b", "final_answer('gold')"),
        ),
    }
    assert plays(play, *said[kind]) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_client_calls_tools(streamed: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    schema = {"type": "object", "properties": {"where": {"type": "string"}}}
    tools = [{"name": "look", "description": "look somewhere", "input_schema": schema}]

    async def play(url: str, key: str) -> float:
        messages: list[Any] = [{"role": "user", "content": "find it"}]
        options = {"model": "policy", "max_tokens": 500, "system": "be brief", "tools": tools}
        async with anthropic.AsyncAnthropic(
            base_url=url.removesuffix("/v1"), api_key=key, max_retries=0
        ) as client:
            while True:
                if streamed:
                    async with client.messages.stream(messages=messages, **options) as stream:
                        said = await stream.get_final_message()
                else:
                    said = await client.messages.create(messages=messages, **options)
                messages.append({"role": "assistant", "content": said.content})
                if said.stop_reason != "tool_use":
                    return float("gold" in said.content[0].text)
                results = [
                    {"type": "tool_result", "tool_use_id": part.id, "content": "nothing"}
                    for part in said.content
                    if part.type == "tool_use"
                ]
                messages.append({"role": "user", "content": results})

    both = "so " + call("look", where="right") + call("look", where="up")
    assert plays(play, call("look", where="left"), both, "gold") == 1


def test_dspy_plays_its_react_module() -> None:
    dspy = pytest.importorskip("dspy")

    async def play(url: str, key: str) -> float:
        model = dspy.LM("openai/policy", api_base=url, api_key=key, cache=False, num_retries=0)
        with dspy.context(lm=model):
            react = dspy.ReAct("question -> answer", tools=[look], max_iters=3)
            found = await react.acall(question="find it")
        return float("gold" in found.answer)

    fields = "[[ ## {} ## ]]\n{}\n\n"

    def said(**values: str) -> str:
        return "".join(fields.format(*one) for one in values.items()) + "[[ ## completed ## ]]"

    turns = [
        said(next_thought="a", next_tool_name="look", next_tool_args=json.dumps({"where": "left"})),
        said(next_thought="b", next_tool_name="finish", next_tool_args="{}"),
        said(reasoning="c", answer="gold"),
    ]
    assert plays(play, *turns) == 3


def test_an_agent_calls_the_tools_of_an_mcp_server() -> None:
    fastmcp = pytest.importorskip("fastmcp")
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.tools import StructuredTool

    server = fastmcp.FastMCP("places")
    server.tool(look)

    async def play(url: str, key: str) -> float:
        async with fastmcp.Client(server) as places:

            def offered(tool: Any) -> Any:
                async def called(**arguments: Any) -> str:
                    return (await places.call_tool(tool.name, arguments)).data

                return StructuredTool.from_function(
                    coroutine=called,
                    name=tool.name,
                    description=tool.description,
                    args_schema=tool.input_schema,
                )

            tools = [offered(tool) for tool in await places.list_tools()]
            model = langchain.ChatOpenAI(model="policy", base_url=url, api_key=key)
            graph = prebuilt.create_react_agent(model, tools)
            result = await graph.ainvoke({"messages": [("user", "find it")]})
        told = [message.content for message in result["messages"] if message.type == "tool"]
        assert "nothing left" in told[0] and "nothing right" in told[1]
        return float("gold" in result["messages"][-1].content)

    assert plays(play, *TWICE) == 1
