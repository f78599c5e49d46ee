"""Settings that all runs of GRPOTrainer here share: float32 on the CPU, nothing saved or said."""

from typing import Any

ON_CPU: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "beta": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "float32"},
    "shuffle_dataset": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def rewards(score: list[float], **_: Any) -> list[float]:
    """Return the rewards that came with the answers."""
    return score
