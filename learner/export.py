"""Writes a Hugging Face directory out of a run's newest checkpoint."""

from pathlib import Path

from evolver_async import checkpoint, policy
from evolver_async.config.load import load
from learner.state import load_policy


def export(run_dir: Path, out: Path) -> str:
    """Write config, weights, tokenizer and chat template to `out`; says in a line what it is."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: exists and is not empty")
    config = load(run_dir / "config.yaml", [])
    newest, manifest = checkpoint.load_newest(run_dir / "checkpoints", run_dir.name)
    model = policy.load_model(config.policy.path, dtype=config.policy.dtype, device="cpu")
    load_policy(model, newest)
    policy.export(model, out, config.policy.path)
    return f"wrote {out}: the policy after step {manifest.step} of {run_dir}"
