"""Agents that rewrite their history at each step: a sequence a step, with shared beginnings."""

from typing import Any

import torch
from collated_groups import collated
from scripted_agents import ASK, Client, Scripted, ask, run
from small_models import SHAPE
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from evolver_async.config import Config
from evolver_async.schema import Group, Role, Task
from learner.optimize.model import layout_of

CPU = torch.device("cpu")
STEPS = 12


async def rewrites(client: Client) -> float:
    """An agent as smolagents' CodeAgent: it puts its own words around what the policy said."""
    messages: list[Any] = [{"role": "system", "content": "write code " * 20}, *ASK]
    for step in range(STEPS):
        said = await ask(client, messages)
        messages.append({"role": "assistant", "content": f"Thought: {said.content}<end>"})
        messages.append({"role": "user", "content": f"Observation {step}: " + "nothing " * 20})
    return 1.0


def test_a_history_that_is_rewritten_at_each_step_trains_as_a_tree() -> None:
    engine = Scripted(*(f"look {step}" for step in range(STEPS)))
    trajectory = run(rewrites, engine, max_turns=STEPS, max_length=1 << 15).one
    assert len(trajectory.sequences) == STEPS
    task = Task(task_id="t", env="bandit", split="train", map_seed=3)
    facts = {"kind": "rollout", "stage": 0, "use": 0}
    batch = collated([Group(group_id=5, task=task, trajectories=[trajectory], **facts)])

    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, head_dim=8))
    layout = layout_of(Config(), model)
    assert layout == "tree", "by default, where trees can act"
    (micro,) = batch.whole().micro_batches(1 << 15, CPU, layout)
    copies = sum(len(sequence.tokens) for sequence in trajectory.sequences)
    longest = max(len(sequence.tokens) for sequence in trajectory.sequences)
    sampled = sum(int((one.roles == Role.ACTION).sum()) for one in trajectory.sequences)
    # the last context is nearly all there is; of each step the sampled tokens stand beside it
    assert longest <= micro.tokens_BT.numel() <= longest + 2 * sampled + 16 * STEPS
    assert copies > 4 * micro.tokens_BT.numel()
    assert len(micro.index_N.unique()) == sampled == len(batch.mu_N), "each is trained once"
