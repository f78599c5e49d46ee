"""Options of a run drawn at random, every one with every other: what the fault tests try out.

Runs of the recipes take seconds. `OPTIONS` are keys with values that differ from the defaults.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.launch.creation import create

BANDIT = """
env: {name: bandit, params: {high_probability: 0.5}}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
reward: ["own_rewards:varied"]
"""
LAKE = """
env: {name: frozen_lake, params: {size: 3}}
rollout: {group_size: 4, max_turns: 3, max_tokens: 6}
reward: ["own_rewards:varied"]
"""
WORKSHOP = """
env: {name: workshop}
rollout: {group_size: 4, max_turns: 3, max_tokens: 6}
reward: ["own_rewards:varied"]
"""
COMMON = """
policy: {max_length: 1536, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2, archive: all}
learner: {groups_per_step: 4, minibatches: 1, lr: 5.0e-3, decay: none}
eval: {every: 3, episodes: 4, final_episodes: 4}
checkpoint: {every: 3, keep: 9}
selection: {max_empty: 100}
judge: {max_tokens: 32}
launch: {kind: serial}
"""
STAGES = (
    "[{kind: sft, steps: 2}, {kind: rl, steps: 6}]",
    "[{kind: rl, steps: 4}, {kind: rl, steps: 3, reset_optimizer: true}]",
    "[{kind: sft, steps: 2}, {kind: rl, steps: 3}, {kind: dpo, steps: 3}]",
    "[{kind: reward_model, steps: 3}, {kind: kto, steps: 2}, {kind: rl, steps: 2}]",
    "[{kind: reflect, steps: 2, alternatives: 1,"
    " override: {rollout: {max_tokens: 64, think: true}}}, {kind: rl, steps: 4}]",
    "[{kind: world_model, steps: 2, alternatives: 1}, {kind: rl, steps: 4}]",
    "[{kind: rl, tokens: 400, steps: 12}]",
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "env.latency.kind": ("fixed", "lognormal"),
    "tasks.train": (3,),
    "tasks.solved": (0.3,),
    "tasks.failed": (0.3,),
    "tasks.synthetic": (0.5,),
    "rollout.think": ("true",),
    "rollout.format": ("tool_call", "interleaved"),
    "rollout.actions_per_turn": (2,),
    "rollout.context": ("window", "single"),
    "rollout.truncated_reward": (-0.5,),
    "rollout.guided": ("failed", "adaptive"),
    "rollout.guided_fraction": (0.25, 1.0),
    "rollout.format_errors": (1,),
    "engine.slots": (3,),
    "engine.prefill_tokens": (16,),
    "engine.in_flight": ("keep_kv", "wait"),
    "actors.weight_lag": (1, 2),
    "actors.weight_lag_low": (0,),
    "buffer.max_staleness": (0, 1),
    "buffer.reuse": (2,),
    "buffer.sampler": ("freshest", "prioritized"),
    "buffer.max_ready": (1.0,),
    "buffer.straggler": ("wait",),
    "buffer.segment_bytes": (65536,),
    "experience.kind": ("contrast",),
    "experience.internalise": ("distill",),
    "experience.strip": ("never",),
    "judge.kind": ("rule", "self"),
    "judge.probes": (1.0,),
    "questioning.kind": ("goals",),
    "questioning.every": (2,),
    "selection.kind": (*("spread", "top_p", "top_k", "min_p", "resample_on_correct", "dynamic"),),
    "selection.scale": ("linear",),
    "selection.members": (2,),
    "advantage.kind": (
        *("grpo_process", "adca", "rloo", "reinforce", "reward_to_go", "opob", "gae"),
        *("gae_bilevel", "vtrace"),
    ),
    "advantage.std": ("batch", "none"),
    "advantage.length": ("sqrt",),
    "advantage.alpha_final": (0.0,),
    "advantage.bootstrap": ("true",),
    "advantage.overlong_limit": (8,),
    "critic.kind": ("separate",),
    "critic.warmup": (2,),
    "correction.kind": (
        *("none", "ppo", "icepop", "geo_mask", "cispo", "gspo", "topr", "vcpo", "m2po", "dppo_tv"),
    ),
    "correction.anchor": ("interpolate",),
    "correction.guided": ("anchor", "behaviour"),
    "correction.level": ("trajectory",),
    "loss.boost": (0.6,),
    "loss.target_kl": (0.01,),
    "loss.aggregation": ("sequence_mean", "sequence_sum_norm"),
    "loss.kl": ("k1", "k2"),
    "loss.kl_coef": (0.1,),
    "loss.kl_place": ("reward",),
    "loss.entropy_coef": (0.01,),
    "loss.entropy_top_k": (5,),
    "learner.minibatches": (2, 4),
    "learner.epochs": (2,),
    "learner.token_budget": (96,),
    "learner.packing": ("false",),
    "learner.prefix_trees": ("always", "never"),
    "learner.gradient_checkpointing": ("true",),
    "learner.logprob_chunk": (7,),
    "learner.weight_decay": (0.1,),
    "learner.decay": ("cosine",),
    "policy.lora.rank": (2,),
    "eval.every": (1, 0),
    "eval.temperature": (1.0,),
    "eval.sets.again.k": (1,),
    "checkpoint.every": (1,),
    "checkpoint.keep": (2,),
    "checkpoint.keep_best": (0,),
    "safety.action": ("checkpoint", "rollback"),
    "safety.warmup": (2,),
    "safety.patience": (1,),
    "metrics.samples_every": (1,),
}
OWN = ("selection.", "advantage.", "correction.", "loss.")  # may be the last stage's alone
SOME = 8  # options of one run, about
KEY = re.compile(r"\b[a-z_]+\.[a-z_]+|\bstages\[")


def finite_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the metrics of a run, all of which are finite."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        assert not row.get("non_finite"), f"step {row.get('step')}: {row['non_finite']}"
    return rows


@dataclass
class Drawn:
    """A configuration that is accepted. `refused`: the refusals of what was drawn before."""

    config: Config
    run_dir: Path
    changes: list[str]
    refused: list[str]


class Died(Exception):
    """Stands for SIGKILL."""


def draw(rng: random.Random, directory: Path, seed: int) -> Drawn:
    """Draw a configuration and make its run directory in `directory`, as the command does.

    `seed`: that of the run. An option that is refused is dropped; without one the base has another
    kind of stages. AssertionError for a refusal that names no key.
    """
    recipe, refused = directory / "recipe.yaml", list[str]()
    fixed = f"run.dir={directory}", "run.name=run", f"weights.dir={directory}", f"run.seed={seed}"
    keys = rng.sample(sorted(OPTIONS), rng.randint(SOME // 2, 2 * SOME))
    values = {key: rng.choice(OPTIONS[key]) for key in keys}
    own = {key for key in keys if key.startswith(OWN) and rng.random() < 0.2}
    base = rng.choice((BANDIT, LAKE, WORKSHOP))
    stages = rng.sample(STAGES, len(STAGES))
    while True:
        recipe.write_text(f"{base}{COMMON}stages: {stages[-1]}\n")
        override = f"stages.{stages[-1].count('kind') - 1}.override."
        changes = [f"{override if key in own else ''}{key}={values[key]}" for key in keys]
        try:
            config, run_dir = create(load(recipe, [*fixed, *changes]), recipe)
        except ValueError as error:
            assert KEY.search(str(error)), f"{changes} are refused, and no key is named: {error}"
            refused.append(str(error))
            named = [key for key in keys if re.search(rf"{re.escape(key)}\b", str(error))]
            if named:
                keys.remove(rng.choice(named))
            else:
                stages.pop()
        else:
            return Drawn(config, run_dir, changes, refused)
