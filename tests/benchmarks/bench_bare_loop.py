"""A learner step against a bare loop of torch over the same rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_bare_loop.py [HIDDENxLAYERS ...]

The learner's step is whole: selection, collation, advantages, its loss, log-probs with entropy,
accounting, clipping, AdamW (the RL stage of `configs/frozen_lake.yaml`, 32 groups of 8 members with
a common prompt, four updates). The bare loop has the rows as padded tensors already, sorted by
length, at the same budget of tokens; it runs transformers' model, the cross-entropy of the ACTION
tokens, backward and AdamW. Both alternate; the ratio is that of processor seconds.
"""

import math
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from bench_learner import RECIPE, episode
from torch.nn import functional as F

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import load, stage_config
from evolver_async.lineages import Fork
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.schema import Group, Sampling, Task, Ticket, WeightId
from learner.data.collate import Internalise, collate, lag_table
from learner.state import LearnerState
from learner.step import Updater

SIZES = ("64x2", "128x2", "256x4")
ROUNDS, REQUIRED = 5, 0.90
FORKS = {1: Fork(lineage=1, parent=0, step=0)}
CPU = torch.device("cpu")


def settings(directory: Path, hidden_size: int, layers: int) -> Config:
    config = load(RECIPE, [])
    sizes = {"hidden_size": hidden_size, "layers": layers, "intermediate_size": 3 * hidden_size}
    path = directory / "policy"
    policy.make_tiny(path, seed=0, heads=4, max_length=config.policy.max_length, words=(), **sizes)
    return replace(
        config,
        policy=replace(config.policy, path=str(path)),
        selection=replace(config.selection, kind="all"),
        loss=replace(config.loss, target_kl=math.inf),  # no step is cut: both loops do equal work
        stages=[StageConfig(kind="rl", steps=100)],
        metrics=replace(config.metrics, samples=0),
    )


def make_groups(config: Config, vocabulary: int) -> list[Group]:
    found = []
    for index in range(config.learner.groups_per_step):
        members = list(range(config.rollout.group_size))
        ticket = Ticket(
            group_id=index,
            task=Task(task_id="t", env="t", split="train", map_seed=0),
            kind="rollout",
            stage=0,
            members=members,
            guided=[],
            dynamics_seed=0,
            attempt=0,
            weights=WeightId(lineage=1, step=0),
            lease_s=1.0,
            sampling=Sampling(temperature=1.0, max_tokens=4),
        )
        trajectories = [episode(ticket, member, vocabulary) for member in members]
        found.append(
            Group(
                group_id=index,
                task=ticket.task,
                kind="rollout",
                stage=0,
                use=0,
                trajectories=trajectories,
            )
        )
    return found


class BareLoop:
    """Updates by torch and transformers alone."""

    def __init__(self, config: Config, groups: list[Group]) -> None:
        self.model = policy.load_model(config.policy.path, dtype="float32", device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        lags = lag_table(groups, WeightId(lineage=1, step=0), FORKS)
        batch = collate(groups, lags, Internalise(0.0, 0))
        self.tokens = len(batch.tokens)
        self.updates: list[tuple[list[tuple[torch.Tensor, torch.Tensor]], int]] = []
        for minibatch in batch.whole().split(config.learner.minibatches, key=0):
            passes = []
            for micro in minibatch.micro_batches(config.learner.token_budget, CPU, "padded"):
                labels = torch.full_like(micro.tokens_BT, -100)
                places = micro.read_K[micro.source_Q]
                labels.view(-1)[places] = micro.target_Q
                passes.append((micro.tokens_BT, labels))
            self.updates.append((passes, minibatch.tokens))

    def step(self) -> None:
        for passes, tokens in self.updates:
            for tokens_BT, labels_BT in passes:
                logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
                loss = F.cross_entropy(
                    logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
                )
                (loss / tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def compare(size: str) -> None:
    hidden_size, layers = (int(one) for one in size.split("x"))
    with tempfile.TemporaryDirectory() as directory:
        config = settings(Path(directory), hidden_size, layers)
        groups = make_groups(config, len(policy.load_tokenizer(config.policy.path)))
        updater, bare = Updater(config, Path(directory), Timers()), BareLoop(config, groups)
        stage, spent = stage_config(config, 0), []
        for take in range(ROUNDS + 1):  # the first warms up
            start = time.process_time()
            result = updater.step(
                "rl", stage, groups, LearnerState(lineage=1, take=take), FORKS, 100
            )
            middle = time.process_time()
            bare.step()
            spent.append((middle - start, time.process_time() - middle))
            assert result.updates == config.learner.minibatches
    ratios = [theirs / ours for ours, theirs in spent[1:]]
    ours, theirs = (statistics.median(one) for one in zip(*spent[1:], strict=True))
    print(
        f"{size}: {statistics.median(ratios):.2f} x the bare loop ({min(ratios):.2f} to "
        f"{max(ratios):.2f}, wanted {REQUIRED}); {bare.tokens / ours:.0f} and "
        f"{bare.tokens / theirs:.0f} tokens a processor second",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    for size in sys.argv[1:] or SIZES:
        compare(size)


if __name__ == "__main__":
    main()
