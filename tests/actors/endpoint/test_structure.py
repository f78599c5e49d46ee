"""Structured output from a random policy: it parses, and the learner scores it as it was sampled."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from scripted_agents import ASK, CHATS, LOOK, NEW, Client, Ran, Scripted, ask, run
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.endpoint import chat_form
from actors.endpoint.request import RequestRefused
from actors.endpoint.session import MAX_GRAMMARS
from actors.endpoint.structure import structure_of
from actors.endpoint.template import Template
from actors.engines.torch_engine import TorchEngine
from actors.formats.chat import Chat
from evolver_async.model import policy
from evolver_async.model.grammar import GrammarError, Grammars
from evolver_async.model.tiny import make_tokenizer
from evolver_async.protocol.trajectories import unwrap, wrap
from evolver_async.schema import Group, Role, Task, Trajectory
from learner.data.batch import Batch
from learner.data.collate import Internalise, collate, lag_table
from learner.data.layout import Layout
from learner.optimize.logprobs import Scorer
from learner.ranks.process_group import alone

LENGTH, TEMPERATURE = 1024, 0.7
TOKENIZER = make_tokenizer(LENGTH)
PLACE = {"enum": ["left", "right"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "where": {"$ref": "#/$defs/place"},
        "steps": {"type": "integer", "minimum": 1, "maximum": 30},
        "name": {"type": "string", "minLength": 3, "maxLength": 5},
        "sure": {"type": "boolean"},
    },
    "required": ["where", "steps", "name", "sure"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
NESTED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ARGUMENTS = {"type": "object", "properties": {"where": PLACE}, "required": ["where"]}
STRICT = {"type": "function", "function": {"name": "look", "parameters": ARGUMENTS, "strict": True}}
OTHER = {"type": "function", "function": {"name": "wait"}}


def model_of() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    spread = {"max_position_embeddings": LENGTH, "initializer_range": 0.1}
    config = Qwen3Config(vocab_size=len(TOKENIZER) + 3, **shape, **heads, **spread)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def engine_of(model: Any) -> TorchEngine:
    limits = {"slots": 4, "max_length": LENGTH, "prefill_tokens": 512}
    return TorchEngine(model, TOKENIZER, weights=NEW, in_flight="keep", **limits)


def play(player: Any, model: Any, **changes: Any) -> Ran:
    usual = {"chat": Chat(TOKENIZER), "max_length": LENGTH, "max_tokens": 100}
    return run(player, engine_of(model), **(usual | changes))


def batch_of(trajectory: Trajectory, model: Any) -> Batch:
    task = Task(task_id="t", env="bandit", split="train", map_seed=0)
    facts: dict[str, Any] = {"task": task, "kind": "rollout", "stage": 0, "use": 0}
    arrived = unwrap(wrap(trajectory))
    group = Group(group_id=0, trajectories=[arrived], **facts)
    lags = lag_table([group], NEW, {})
    grammars = Grammars(TOKENIZER, model.config.vocab_size)
    return collate([group], lags, Internalise(0.0, 0), grammars=lambda: grammars)


def conforms(value: Any) -> bool:
    assert set(value) == {"where", "steps", "name", "sure"}
    assert value["where"] in ("left", "right") and type(value["sure"]) is bool
    return 1 <= value["steps"] <= 30 and 3 <= len(value["name"]) <= 5


def test_a_random_policy_answers_by_the_schema_in_every_form() -> None:
    heard: list[dict[str, Any]] = []

    async def player(client: Client) -> float:
        headers = {"x-api-key": client.api_key}
        user = {"role": "user", "content": "where?"}
        bodies = {
            "chat/completions": {"messages": [user], "response_format": NESTED},
            "responses": {"input": "where?", "text": {"format": FORMAT}},
            "messages": {
                "messages": [user],
                "max_tokens": 90,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        }
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as raw:
            for path, body in bodies.items():
                answer = await raw.post(f"{client.base_url}{path}", json={"model": "m"} | body)
                assert answer.status_code == 200, answer.text
                heard.append(answer.json())
        return 1.0

    ran = play(player, model_of())
    chat, response, message = heard
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert response["text"]["format"] == FORMAT
    texts = [
        chat["choices"][0]["message"]["content"],
        response["output"][0]["content"][0]["text"],
        message["content"][0]["text"],
    ]
    assert all(conforms(json.loads(text)) for text in texts)
    assert [grammar.turns for grammar in ran.one.grammars] == [[0, 1, 2]]
    assert ran.one.turn_flags.tolist() == [0, 0, 0]
    # when the grammar is complete, only the end of the turn is left
    (sequence, *_) = ran.one.sequences
    assert sequence.tokens[-1] == TOKENIZER.eos_token_id and sequence.logprobs[-1] == 0


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_the_learner_scores_the_masked_distribution(layout: Layout) -> None:
    model = model_of()

    async def player(client: Client) -> float:
        tools = {"tools": [STRICT, OTHER]}
        asked: list[dict[str, Any]] = [
            {"response_format": NESTED},
            {"response_format": {"type": "json_object"}, "max_tokens": 20},
            {"max_tokens": 20},
            {"tool_choice": "required", **tools, "max_tokens": 60},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}, **tools},
            {**tools, "max_tokens": 20},
        ]
        for options in asked:
            await ask(client, ASK, **options)
        return 1.0

    trajectory = play(player, model).one
    assert sorted(turn for one in trajectory.grammars for turn in one.turns) == [0, 1, 3, 4, 5]
    batch = batch_of(trajectory, model)
    assert batch.mask_N is not None
    ruled = {turn: batch.mask_N[batch.turn_N == turn] >= 0 for turn in range(6)}
    assert [bool(ruled[turn].all()) for turn in (0, 1, 3, 4)] == [True] * 4
    assert not ruled[2].any() and not ruled[5].all()
    score = Scorer(TEMPERATURE, token_budget=4096, chunk=16, ranks=alone("cpu"), layout=layout)
    if layout != "padded":
        model.set_attn_implementation("sdpa")
    np.testing.assert_allclose(score(model, batch.whole()), batch.mu_N, atol=1e-4)


@pytest.mark.parametrize("named", [True, False])
def test_arguments_of_a_forced_strict_tool_obey_its_schema(named: bool) -> None:
    heard: list[Any] = []
    choice = {"type": "function", "function": {"name": "look"}} if named else "required"

    async def player(client: Client) -> float:
        options = {"tools": [STRICT], "tool_choice": choice, "parallel_tool_calls": False}
        heard.append(await ask(client, ASK, **options))
        return 1.0

    play(player, model_of())
    (call,) = heard[0].tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["where"] in ("left", "right")


def test_beside_tools_an_answer_by_the_schema_or_a_call_is_sampled() -> None:
    heard: list[Any] = []

    async def player(client: Client) -> float:
        for _ in range(8):
            options = {"tools": [STRICT], "parallel_tool_calls": False}
            heard.append(await ask(client, ASK, response_format=NESTED, **options))
        return 1.0

    play(player, model_of())
    answers = [one for one in heard if not one.tool_calls]
    assert all(conforms(json.loads(one.content)) for one in answers)
    assert 0 < len(answers) < len(heard)


def test_the_gradient_flows_through_allowed_tokens_alone() -> None:
    model = model_of()

    async def player(client: Client) -> float:
        await ask(client, ASK, response_format=NESTED)
        return 1.0

    batch = batch_of(play(player, model).one, model)
    (micro,) = batch.whole().micro_batches(4096, torch.device("cpu"))
    hidden_KD = policy.hidden_states(model, micro.tokens_BT, None, micro.read_K).detach()
    hidden_QD = hidden_KD[micro.source_Q]
    assert micro.masks_Q is not None
    seen: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *call: seen.append(call[-1]) or call[-1])
    model.config.tie_word_embeddings = False
    found = {}
    for masks in (micro.masks_Q, None):
        seen.clear()
        found[masks is None] = policy.target_logprobs(
            *(model, hidden_QD, micro.target_Q, TEMPERATURE, 4096),
            with_entropy=True,
            masks=masks,
        )
    hook.remove()
    logprobs_Q, entropy_Q = found[False]
    mask_Q, allowed_MW = micro.masks_Q
    allowed_QV = np.unpackbits(allowed_MW[mask_Q].numpy(), axis=1, bitorder="little")
    allowed_QV = torch.from_numpy(allowed_QV[:, : model.config.vocab_size].astype(bool))
    logits_QV = (hidden_QD @ head.weight.T).detach().requires_grad_()
    naive_QV = (logits_QV / TEMPERATURE).masked_fill(~allowed_QV, -torch.inf).log_softmax(-1)
    naive_Q = naive_QV.gather(1, micro.target_Q[:, None])[:, 0]
    assert (naive_Q - logprobs_Q).abs().max() < 1e-5
    assert (entropy_Q >= -1e-6).all() and entropy_Q.isfinite().all()
    single_Q = allowed_QV.sum(1) == 1
    assert single_Q.any() and (entropy_Q[single_Q].abs() < 1e-6).all()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "banana"}, "banana"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a: not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"anyOf": [{"type": "string", "format": "nonsense"}]}, "#/anyOf/0.*nonsense"),
        ({"$ref": "https://example.org/x"}, "ref"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "none"),
    ],
    ids=str,
)
def test_a_schema_that_no_grammar_expresses_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises((RequestRefused, GrammarError), match=named):
        form = structure_of("text.format", {"type": "json_schema", "schema": schema})
        assert form is not None
        from actors.endpoint import structure

        Grammars(TOKENIZER, len(TOKENIZER)).state(
            structure.grammar(structure.answer(form.schema)), [3]
        )


def test_a_refused_schema_costs_no_turn() -> None:
    statuses: list[int] = []

    async def player(client: Client) -> float:
        headers = {"x-api-key": client.api_key}
        long = {"type": "object", "properties": {"a": {"enum": ["x" * MAX_GRAMMARS]}}}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as raw:
            for schema in ({"type": "banana"}, {"not": {}}, long, SCHEMA):
                form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
                body = {"model": "m", "messages": ASK, "response_format": form}
                answer = await raw.post(f"{client.base_url}chat/completions", json=body)
                statuses.append(answer.status_code)
                if answer.status_code != 200:
                    assert "response_format: " in answer.json()["error"]["message"]
        return 1.0

    ran = play(player, model_of())
    assert statuses == [400, 400, 400, 200] and len(ran.one.turn_flags) == 1


def test_an_engine_without_grammars_refuses_and_leaves_strict_tools_free() -> None:
    engine = Scripted("gold")

    async def player(client: Client) -> float:
        with pytest.raises(Exception, match="response_format: needs"):
            await ask(client, ASK, response_format=NESTED)
        await ask(client, ASK, tools=[STRICT])
        return 1.0

    trajectory = run(player, engine).one
    assert engine.requests[0].grammar == "" and trajectory.grammars == []
