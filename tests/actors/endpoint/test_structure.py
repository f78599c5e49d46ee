"""Structured output of a random policy: it parses, and the learner scores it as it was sampled."""

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from msgspec.structs import replace
from random_policy import LENGTH, TOKENIZER, model_of, play
from scripted_agents import ASK, NEW, Client, Scripted, ask, run
from updates import config, updater

from actors.endpoint import structure
from actors.endpoint.request import RequestRefused
from actors.endpoint.session import MAX_GRAMMARS
from actors.formats.chat import Chat
from evolver_async.config import StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.model.grammar import GrammarError, Grammars
from evolver_async.schema import Group, Role, Task, Trajectory
from evolver_async.wire.trajectory_bytes import unwrap, wrap
from learner.data.batch import Batch
from learner.data.collate import Internalise, collate, lag_table
from learner.data.layout import Layout
from learner.optimize.logprobs import Scorer
from learner.ranks.process_group import alone
from learner.state import LearnerState

TEMPERATURE = 0.7
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


def group_of(trajectory: Trajectory) -> Group:
    """The group as it arrives."""
    task = Task(task_id="t", env="bandit", split="train", map_seed=0)
    facts: dict[str, Any] = {"task": task, "kind": "rollout", "stage": 0, "use": 0}
    return Group(group_id=0, trajectories=[unwrap(wrap(trajectory))], **facts)


def batch_of(trajectory: Trajectory, model: Any) -> Batch:
    group = group_of(trajectory)
    lags = lag_table([group], NEW, {})
    grammars = Grammars(TOKENIZER, model.config.vocab_size)
    return collate([group], lags, Internalise(0.0, 0), grammars=lambda: grammars)


def bits(mask_W: np.ndarray | None) -> list[int]:
    assert mask_W is not None
    return np.flatnonzero(np.unpackbits(mask_W, bitorder="little")).tolist()


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
    hidden_KD = policy.hidden_states(model, micro.tokens_BT, None, micro.read_K)
    hidden_QD = hidden_KD[micro.source_Q].detach()
    assert micro.masks_Q is not None
    mask_Q, allowed_MW = micro.masks_Q
    allowed_QV = np.unpackbits(allowed_MW[mask_Q].numpy(), axis=1, bitorder="little")
    allowed_QV = torch.from_numpy(allowed_QV[:, : model.config.vocab_size].astype(bool))
    weight_VD = model.get_output_embeddings().weight
    gradients, entropies = [], []
    for masks in (micro.masks_Q, None):
        logprobs_Q, entropy_Q = policy.target_logprobs(
            *(model, hidden_QD, micro.target_Q, TEMPERATURE, 16), with_entropy=True, masks=masks
        )
        gradients += torch.autograd.grad(logprobs_Q.sum() + entropy_Q.sum(), weight_VD)
        entropies.append(entropy_Q)
        if masks is not None:
            logits_QV = (hidden_QD @ weight_VD.T / TEMPERATURE).masked_fill(~allowed_QV, -torch.inf)
            naive_Q = logits_QV.log_softmax(-1).gather(1, micro.target_Q[:, None])[:, 0]
            assert (naive_Q - logprobs_Q).abs().max() < 1e-5
            assert (naive_Q[micro.prediction_N] - micro.mu_N).abs().max() < 1e-5
    never_V = ~allowed_QV.any(0)
    masked_VD, whole_VD = gradients
    assert never_V.any() and not masked_VD[never_V].any() and masked_VD[~never_V].any()
    assert whole_VD[never_V].abs().sum(1).all()
    single_Q = allowed_QV.sum(1) == 1
    assert single_Q.any() and (entropies[0][single_Q] == 0).all()
    assert (entropies[0] < entropies[1]).all()


def test_ratios_of_a_first_step_are_one(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48}
    policy.make_tiny(path, seed=0, max_length=LENGTH, **sizes)
    settings = config(path, [StageConfig(kind="rl", steps=3)], kl_coef=0.1)
    settings.rollout.temperature = TEMPERATURE
    settings.policy.max_length = LENGTH
    learner = updater(settings, tmp_path)

    async def player(client: Client) -> float:
        await ask(client, ASK, response_format=NESTED)
        await ask(client, ASK)
        return 1.0

    group = group_of(play(player, copy.deepcopy(learner.model)).one)
    stage = stage_config(settings, 0)
    learner.ensure_reference(stage, 0)
    state = LearnerState(lineage=NEW.lineage)
    outcome = learner.rl(stage, [group], state, {}, 3)
    assert outcome.updates == 1
    assert outcome.metrics["loss/kl"] == pytest.approx(0, abs=1e-6)
    for name in ("w_mean", "w_q05", "w_q95", "r_mean"):
        assert outcome.metrics[f"offpolicy/{name}"] == pytest.approx(1, abs=1e-5)


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
        form = structure.structure_of("text.format", {"type": "json_schema", "schema": schema})
        assert form is not None
        text = structure.grammar(structure.answer(form.schema))
        Grammars(TOKENIZER, len(TOKENIZER)).state(text, [3])


def test_special_tokens_are_no_text_of_a_grammar_and_free_text_may_have_them() -> None:
    compiler = Grammars(TOKENIZER, len(TOKENIZER))
    (stop, special) = (TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("<|user|>"))
    tools = [("look", ARGUMENTS)]
    free = compiler.state(structure.grammar(structure.calls_in_text(tools)), [stop])
    for token in (special, *TOKENIZER.encode("so <tool_call>")):
        assert free.allowed() is None
        free.accept(token)
    (newline,) = TOKENIZER.encode("\n")
    assert bits(free.allowed()) == [newline]
    ruled = compiler.state(structure.grammar(structure.answer({"type": "string"})), [stop])
    for token in TOKENIZER.encode('"a'):
        ruled.allowed()
        ruled.accept(token)
    found = bits(ruled.allowed())
    assert TOKENIZER.convert_tokens_to_ids("left") in found
    assert not {stop, special} & {*found}
    with pytest.raises(GrammarError):
        ruled.accept(special)


def test_a_grammar_that_no_token_continues_is_refused() -> None:
    tab = {"type": "string", "pattern": "^\t$"}  # control characters are no JSON

    async def player(client: Client) -> float:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": tab}}
        with pytest.raises(openai.BadRequestError, match="response_format: no token"):
            await ask(client, ASK, response_format=form)
        await ask(client, ASK, max_tokens=3)
        return 1.0

    ran = play(player, model_of())
    assert len(ran.one.turn_flags) == 1 and ran.counts["agent/episodes"] == 1


def test_a_thought_that_a_template_opens_is_closed_before_an_answer() -> None:
    thinking = copy.deepcopy(TOKENIZER)
    thinking.chat_template = thinking.chat_template.replace(
        "<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"
    )
    heard: list[str] = []

    async def player(client: Client) -> float:
        heard.append((await ask(client, ASK, response_format=NESTED)).content)
        return 1.0

    chat = Chat(thinking)
    (sequence,) = play(player, model_of(), chat=chat).one.sequences
    assert conforms(json.loads(heard[0]))
    given = chat.decoded(sequence.tokens[sequence.roles == Role.PROMPT].tolist())
    assert given.endswith("<think>\n\n</think>\n\n")


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
        with pytest.raises(openai.BadRequestError, match="response_format: needs"):
            await ask(client, ASK, response_format=NESTED)
        await ask(client, ASK, tools=[STRICT])
        return 1.0

    trajectory = run(player, engine).one
    assert engine.requests[0].grammar == "" and trajectory.grammars == []


def test_tokens_and_turns_that_do_not_fit_their_grammar_are_refused_by_name() -> None:
    model = model_of()

    async def player(client: Client) -> float:
        await ask(client, ASK, response_format=NESTED)
        return 1.0

    trajectory = play(player, model).one
    (grammar,) = trajectory.grammars
    for turns in ([1], [0, 0]):
        with pytest.raises(ValueError, match="grammars"):
            replace(trajectory, grammars=[replace(grammar, turns=turns)])
    (sequence,) = trajectory.sequences
    tokens = sequence.tokens.copy()
    tokens[sequence.roles == Role.ACTION] = TOKENIZER.eos_token_id
    broken = replace(trajectory, sequences=[replace(sequence, tokens=tokens)])
    with pytest.raises(GrammarError, match=rf"{trajectory.trajectory_id}, turn 0: token"):
        batch_of(broken, model)
