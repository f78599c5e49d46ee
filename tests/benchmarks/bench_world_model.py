"""How exactly a policy knows what its actions lead to, on maps that it has never seen.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_world_model.py --out DIR [--seeds 0 1 2]

Trains configs/world_model.yaml (a run that is complete in DIR is not repeated), plays the solver's
way through held-out maps and tries other actions in one of its states each. An outcome counts as
known where the likeliest token is right at every place, which is where greedy decoding would write
it exactly. The exit code is 1 where less than 95 % are, on average over the seeds.
"""

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

import torch
from recipes import CONFIGS
from safetensors.torch import load_file
from training import train

from actors.formats.chat import Chat
from actors.rollout.episode_config import setting_of
from actors.scripted.branching import branch_group
from actors.ticket_progress import TicketProgress
from evolver_async.buffer.stages import source_of
from evolver_async.buffer.tasks.task_source import held_out_task
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.config import Config
from evolver_async.config.load import load, stage_config
from evolver_async.model import policy
from evolver_async.randomness import key
from evolver_async.schema import Role, Sampling, Sequence, Ticket

LEAST = 0.95


def rows_of(config: Config, maps: int) -> list[Sequence]:
    """What the solver's action and others lead to, in one state of each held-out map."""
    setting = setting_of(config, Chat(policy.load_tokenizer(config.policy.path)), "bench", 0)
    source, rows = source_of(config), list[Sequence]()
    for number in range(maps):
        ticket = Ticket(
            group_id=number,
            task=held_out_task(source, number),
            kind="branch",
            stage=0,
            members=[0],
            guided=[],
            dynamics_seed=key(0, "bench", number),
            attempt=0,
            weights=None,
            lease_s=0.0,
            sampling=Sampling(temperature=1.0, max_tokens=config.rollout.max_tokens),
        )
        asyncio.run(
            branch_group(
                ticket,
                setting,
                config.stages[0],
                TicketProgress(),
                lambda finished: rows.extend(finished.trajectory.sequences),
            )
        )
    return rows


@torch.no_grad()
def known(model: torch.nn.Module, row: Sequence) -> bool:
    """Whether the likeliest token is the right one wherever something is to be known."""
    tokens_BT = torch.from_numpy(row.tokens).long()[None]
    _, head = policy.split_model(model)
    likeliest_T = head(policy.hidden_states(model, tokens_BT))[0].argmax(-1)
    places = torch.from_numpy(row.roles == Role.ACTION).nonzero().flatten()
    return bool((likeliest_T[places - 1] == tokens_BT[0, places]).all())


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--maps", type=int, default=256)
    args = parser.parse_args()
    shares = []
    for seed in args.seeds:
        run = args.out / f"world_model-{seed}"
        train(CONFIGS / "world_model.yaml", run.name, seed, args.out)
        config = stage_config(load(run / "config.yaml", []), 0)
        model = policy.load_model(config.policy.path, dtype="float32", device="cpu")
        newest, _ = checkpoint.load_newest(run / "checkpoints", run.name)
        policy.load_state(model, load_file(newest / "model.safetensors"))
        rows = rows_of(config, args.maps)
        shares.append(statistics.fmean(known(model, row) for row in rows))
        print(f"seed {seed}: {shares[-1]:.3f} of {len(rows)} outcomes known", flush=True)
    mean = statistics.fmean(shares)
    print(f"mean {mean:.3f}, at least {LEAST}: {'reached' if mean >= LEAST else 'MISSED'}")
    return mean < LEAST


if __name__ == "__main__":
    sys.exit(main())
