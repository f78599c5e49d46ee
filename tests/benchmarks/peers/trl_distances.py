"""Losses of TRL's GKDTrainer on fixed logits: writes the numbers of the test of divergences.

    .venv-peer-trl/bin/python tests/benchmarks/peers/trl_distances.py tests/data/trl_gkd.json

It runs in the environment that `bench_trl.py` makes. All numbers are those of
`GKDTrainer.generalized_jsd_loss`, reduced to the mean over the labelled tokens.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from trl.experimental.gkd import GKDTrainer


def main(out: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(2, 4, 9, generator=draws) for _ in range(2))
    student, teacher = student.round(decimals=3), teacher.round(decimals=3)
    labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 4, 5]])
    cases = []
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        for temperature in (1.0, 0.7):
            loss = GKDTrainer.generalized_jsd_loss(
                student, teacher, labels=labels, beta=beta, temperature=temperature
            )
            cases.append({"beta": beta, "temperature": temperature, "loss": float(loss)})
    found = {"trl": version("trl"), "cases": cases, "labels": labels.tolist()}
    found |= {"student": student.tolist(), "teacher": teacher.tolist()}
    out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
