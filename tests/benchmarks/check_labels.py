"""Every token of a run with adapters against a plain forward under the weights that its label
names.

    .venv-vllm/bin/python -m evolver_async.cli train tests/benchmarks/check_labels.yaml
    .venv/bin/python tests/benchmarks/check_labels.py runs/NAME

The run keeps a checkpoint of each version (`checkpoint.every: 1`). Tokens behind an update within
their sequence are told apart: with `keep_kv` their context has KV of other weights.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from evolver_async.files import parsed
from evolver_async.model import lora
from evolver_async.model.policy import load_model, load_state
from evolver_async.runs.results.loaded_run import RunResults
from evolver_async.schema import Role, Sequence

LIMIT = 1e-4


class Labelled(NamedTuple):
    """A trained sequence, and the version of each of its sampled tokens."""

    sequence: Sequence
    steps: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("run", type=Path)
    run = RunResults(parser.parse_args().run)
    torch.set_num_threads(1)
    policy = run.config.policy
    model = load_model(policy.path, dtype="float32", device="cpu").eval()
    rank, alpha = policy.lora.rank, policy.lora.alpha
    lora.inject(model, rank=rank, alpha=alpha, targets=[], seed=0)
    places = {
        parsed((place / "state.json").read_text())["version"]: place
        for place in sorted((run.path / "checkpoints").iterdir())
        if (place / "state.json").is_file()
    }
    sequences = list(_sequences(run))
    first, later = list[float](), list[float]()
    for version in sorted({int(step) for one in sequences for step in one.steps}):
        load_state(model, load_file(places[version] / "model.safetensors"))
        for one in sequences:
            mine = one.steps == version
            if mine.any():
                found = _differences(model, one.sequence, run.config.rollout.temperature)[mine]
                (first if one.steps[0] == version else later).extend(found.tolist())
    for what, found in (("version", first), ("later versions", later)):
        over = sum(one > LIMIT for one in found)
        print(
            f"tokens of their sequence's first {what}: {len(found)}, largest difference"
            f" {max(found, default=0.0):.2g}, {over} over {LIMIT:g}"
        )


def _sequences(run: RunResults) -> Iterator[Labelled]:
    for trajectory in run.trajectories:
        if trajectory.kept and trajectory.kind == "rollout":
            for sequence in trajectory.load().sequences:
                steps = [part.weights.step for part in sequence.versions]
                counts = [part.tokens for part in sequence.versions]
                yield Labelled(sequence, np.repeat(steps, counts))


@torch.no_grad()
def _differences(model: torch.nn.Module, sequence: Sequence, temperature: float) -> np.ndarray:
    """Return |recorded - computed| of the log-probabilities of the sampled tokens."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    logits = model(tokens).logits[0, :-1].float() / temperature
    computed = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    sampled = np.flatnonzero(sequence.roles == Role.ACTION)
    return np.abs(computed[sampled - 1] - sequence.logprobs[sampled])


if __name__ == "__main__":
    main()
