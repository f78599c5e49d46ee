"""A learner step beside TRL's GRPOTrainer over the same answers: tokens a processor second.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_trl.py [--rounds 5] [HIDDENxLAYERS ...]

A step is four optimizer updates of 8 groups with 8 members each (the RL stage of
`configs/frozen_lake.yaml`): prompts of 60 tokens, answers of 15 to 105, the same rows, rewards and
model for both, in float32 on one thread. Tokens are all those of the rows, without padding. No
generation is counted.

Ours is the whole of `Updater.rl`: selection, collation, advantages, its loss with an entropy bonus,
accounting, clipping, AdamW. TRL's is all that GRPOTrainer does from each return of `rollout_func`
to the next call of it (`peers/trl_learner.py`), twice. With one generation for the four updates, as
ours, TRL scores the rows once more for their old log-probs. With a generation for each update it
needs no scoring. The batch of a forward pass is the one of `BATCHES` that is the fastest for TRL.

TRL runs in an environment of its own, `.venv-peer-trl`, which the first call makes. Rounds
alternate; the ratio, ours to TRL's, is taken within a round.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_trl.py --time-to .85 [--seeds 0] [--limit 900]
        [--latency .05]

trains both on FrozenLake instead, until success on held-out tasks reaches the mark, with fast or
with slow environments (`trl_time_to.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import omegaconf
import torch
import transformers
from bench_bare_loop import FORKS, SIZES, make_groups, settings
from bench_learner import PROMPT
from bench_peers import ROOT, SCRIPTS, Peer, install, spread
from trl_time_to import race

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.schema import Group, Role
from learner.state import LearnerState
from learner.step import Updater

PEER = Peer(
    "trl_learner.py",
    [
        f"torch=={torch.__version__.split('+')[0]}",
        f"transformers=={transformers.__version__}",
        "trl==1.16.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        f"msgspec=={msgspec.__version__}",  # these two for our environment and prompts
        f"omegaconf=={omegaconf.__version__}",
    ],
)
BATCHES = (16, 32, 64)  # smaller ones take TRL longer
TRIALS = 3  # steps to choose a batch by
REQUIRED = 2.5


@dataclass(frozen=True)
class Trl:
    """A process of TRL's trainer that takes a step when it is asked to."""

    process: subprocess.Popen[str]
    errors: Path
    updates: int

    @staticmethod
    def start(directory: Path, config: Config, batch: int, generations: int) -> "Trl":
        errors = directory / "errors.txt"
        learner = config.learner
        numbers = (batch, generations, learner.minibatches, learner.lr, learner.eps)
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [
                    str(ROOT / ".venv-peer-trl" / "bin" / "python"),
                    str(SCRIPTS / PEER.script),
                    str(directory / "answers.json"),
                    config.policy.path,
                    *map(str, numbers),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "TRL_EXPERIMENTAL_SILENCE": "1",
                },
            )
        return Trl(process, errors, learner.minibatches)

    def step(self) -> float:
        """Take a step; return its processor seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"used_s"'):
                figures = json.loads(line)
                assert figures["updates"] == self.updates, figures
                return figures["used_s"]
        sys.exit(f"TRL ended with {self.process.wait()}:\n{self.errors.read_text()}")

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.read()
        self.process.wait()


def answers_of(group: Group) -> dict[str, Any]:
    """Return a group as `rollout_func` gives it: the prompt and the answers behind it."""
    members = []
    for trajectory in group.trajectories:
        (sequence,) = trajectory.sequences
        members.append(
            {
                "completion_ids": sequence.tokens[PROMPT:].tolist(),
                "env_mask": (sequence.roles[PROMPT:] == Role.ACTION).astype(int).tolist(),
                "logprobs": sequence.logprobs[PROMPT:].tolist(),
                "score": trajectory.reward,
            }
        )
    return {"prompt": sequence.tokens[:PROMPT].tolist(), "members": members}


def fastest_batch(directory: Path, config: Config) -> int:
    """Return the batch whose step, after one that warms up, takes TRL the fewest seconds."""
    seconds = {}
    for batch in BATCHES:
        trl = Trl.start(directory, config, batch, generations=1)
        trl.step()
        seconds[batch] = min(trl.step() for _ in range(TRIALS))
        trl.end()
    return min(seconds, key=seconds.__getitem__)


def compare(size: str, rounds: int) -> None:
    hidden_size, layers = (int(one) for one in size.split("x"))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = settings(directory, hidden_size, layers)
        groups = make_groups(config, len(policy.load_tokenizer(config.policy.path)))
        members = [one for group in groups for one in group.trajectories]
        tokens = sum(len(one.tokens) for member in members for one in member.sequences)
        (directory / "answers.json").write_text(json.dumps([answers_of(one) for one in groups]))
        batch = fastest_batch(directory, config)
        updater, stage, spent = Updater(config, directory, Timers()), stage_config(config, 0), []
        peers = [
            Trl.start(directory, config, batch, generations)
            for generations in (1, config.learner.minibatches)
        ]
        for take in range(rounds + 1):  # the first warms up
            start = time.process_time()
            result = updater.step(
                "rl", stage, groups, LearnerState(lineage=1, take=take), FORKS, 100
            )
            ours_s = time.process_time() - start
            assert result.updates == config.learner.minibatches
            spent.append((ours_s, *(peer.step() for peer in peers)))
        for peer in peers:
            peer.end()
    ours, shared, fresh = zip(*spent[1:], strict=True)
    print(f"{size}, {rounds} rounds: ours {spread([tokens / one for one in ours], 0)} tokens/CPU s")
    for name, theirs in (("one generation", shared), ("one an update", fresh)):
        print(
            f"  TRL, {name}, batch {batch}: {spread([tokens / one for one in theirs], 0)}; "
            f"ratio {spread([b / a for a, b in zip(ours, theirs, strict=True)], 2)}, "
            f"wanted {REQUIRED}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("sizes", nargs="*", metavar="HIDDENxLAYERS", help=", ".join(SIZES))
    parser.add_argument("--time-to", type=float, metavar="SUCCESS")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if reason := install("trl", PEER):
        sys.exit(f"TRL is not installed: {reason}")
    if args.time_to is not None:
        for seed in args.seeds:
            race(seed, args.time_to, args.limit, args.latency)
        return
    for size in args.sizes or SIZES:
        compare(size, args.rounds)


if __name__ == "__main__":
    main()
