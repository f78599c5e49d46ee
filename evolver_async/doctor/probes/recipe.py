"""Probes of a recipe: the size of its model, and the problems that its start would report."""

from pathlib import Path
from typing import Any

from evolver_async.config import hub
from evolver_async.config.shape import GGUF
from evolver_async.doctor.probes.result import ProbeResult


def recipe(path: str, *dotlist: str) -> ProbeResult:
    """List the problems for which the start of this recipe would be refused."""
    from evolver_async.config.load import load
    from evolver_async.launch.start_checks import problems_of

    problems = problems_of(load(path, dotlist))
    return ProbeResult(not problems, "\n".join(problems), {"problems": problems})


def model(path: str, *dotlist: str) -> ProbeResult:
    """Compute the sizes of a recipe's policy from its configuration; read no weights."""
    from evolver_async.config.load import load
    from evolver_async.config.paths import with_absolute_paths

    whole = with_absolute_paths(load(path, dotlist))
    policy = whole.policy
    place, given = Path(policy.path), dict[str, str]()
    if hub.is_id(policy.path):
        found = hub.cached(policy)
        if found is None:
            return ProbeResult(False, f"policy.path: {policy.path} is not in the local cache")
        place = found
    elif place.suffix == GGUF and place.is_file():
        place, given = place.parent, {"gguf_file": place.name}
    elif policy.path and not place.is_dir():
        return ProbeResult(False, f"policy.path: {policy.path} is not a directory")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from evolver_async.launch.registry import resolve
    from evolver_async.model.positions import positions_of
    from evolver_async.model.tiny import make_tokenizer, tiny_shape

    config: Any = (
        AutoConfig.from_pretrained(place, local_files_only=True, **given)
        if policy.path
        else tiny_shape(
            make_tokenizer(policy.max_length, resolve("vocabulary")(whole)),
            hidden_size=policy.hidden_size,
            layers=policy.layers,
            heads=policy.heads,
            intermediate_size=policy.intermediate_size,
        )
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    facts = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "positions": positions_of(config, whole.engine.kind) or policy.max_length,
    }
    return ProbeResult(True, f"{type(model).__name__}, {facts['parameters']:,} parameters", facts)


def pace(path: str, *dotlist: str) -> ProbeResult:
    """Time the model of a recipe, and tell what a step would take."""
    from evolver_async.config.load import load
    from evolver_async.config.paths import with_absolute_paths
    from evolver_async.launch.pace import lines, time_texts
    from evolver_async.launch.registry import resolve

    config = resolve("formats")(with_absolute_paths(load(path, dotlist)))
    return ProbeResult(True, "\n".join(lines(time_texts(config, resolve("pace")(config)))))
