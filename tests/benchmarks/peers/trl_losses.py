"""Losses of TRL's trainers for preferences on one batch: what `tests/data/trl_losses.json` holds.

    python tests/benchmarks/bench_trl.py --time-to 1 --seeds  # makes .venv-peer-trl
    .venv-peer-trl/bin/python tests/benchmarks/peers/trl_losses.py tests/data/trl_losses.json

It runs in the environment of the peer. The policy, the reference and the reward model are those of
`tests/support/drawn_models.py`, so that `tests/learner/loss/test_trl.py` makes them again. The
tokens are those that TRL makes of the texts.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import torch
from datasets import Dataset
from drawn_models import drawn_classifier, drawn_policy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

PAIRS = [
    ("walk to the goal :", " left down", " up up right"),
    ("you are at row 2 :", " right", " left left"),
    ("avoid the holes :", " down down right up", " down"),
]
JUDGED = [
    ("walk to the goal :", " left down", True),
    ("you are at row 2 :", " left left up", False),
    ("avoid the holes :", " down right", True),
    ("reach the goal :", " up", True),
    ("the frozen lake :", " right right down", False),
]
BETA, CENTRE, DESIRABLE, UNDESIRABLE = 0.3, 0.05, 1.25, 0.75


def settings(directory: str, rows: int) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "per_device_train_batch_size": rows,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_length": None,
    }


def loss_of(trainer: Any) -> float:
    """Return the trainer's loss of its only batch."""
    (batch,) = trainer.get_train_dataloader()
    trainer.model.eval()
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, batch))


def main() -> None:
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("trl", "torch")}}
    with tempfile.TemporaryDirectory() as held:
        place = Path(held)
        policy, reference = drawn_policy(place / "1", 1), drawn_policy(place / "0", 0)
        tokenizer = AutoTokenizer.from_pretrained(policy)

        def models() -> dict[str, Any]:
            both = [AutoModelForCausalLM.from_pretrained(one) for one in (policy, reference)]
            return {"model": both[0], "ref_model": both[1], "processing_class": tokenizer}

        names = ("prompt", "chosen", "rejected")
        rows = Dataset.from_list([dict(zip(names, one, strict=True)) for one in PAIRS])
        args = DPOConfig(**settings(held, len(PAIRS)), beta=BETA)
        trainer = DPOTrainer(**models(), args=args, train_dataset=rows)
        found["pairs"] = [
            {name: one[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
            for one in trainer.train_dataset
        ]
        found["dpo"] = {"beta": BETA, "loss": loss_of(trainer)}

        classifier = drawn_classifier(place / "2", 2)
        args = RewardConfig(**settings(held, len(PAIRS)), center_rewards_coefficient=CENTRE)
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(classifier),
            processing_class=tokenizer,
            args=args,
            train_dataset=rows,
        )
        for ours, theirs in zip(found["pairs"], trainer.train_dataset, strict=True):
            for name in ("chosen_ids", "rejected_ids"):
                assert theirs[name] == ours["prompt_ids"] + ours[name], "the same rows"
        found["reward_model"] = {"centre_coef": CENTRE, "loss": loss_of(trainer)}

        names = ("prompt", "completion", "label")
        rows = Dataset.from_list([dict(zip(names, one, strict=True)) for one in JUDGED])
        weights = {"desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
        args = KTOConfig(**settings(held, len(JUDGED)), beta=BETA, **weights)
        trainer = KTOTrainer(**models(), args=args, train_dataset=rows)
        found["judged"] = [
            {name: one[name] for name in ("prompt_ids", "completion_ids", "label")}
            for one in trainer.train_dataset
        ]
        found["kto"] = {"beta": BETA, **weights, "loss": loss_of(trainer)}
        found["kto"]["kl"] = trainer._metrics["eval"]["kl"][-1]
    lines = (f' "{name}": {json.dumps(value)}' for name, value in found.items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
