"""The model that a learner trains, as the run's configuration asks for it."""

from transformers import PreTrainedModel

from evolver_async.config import Config
from evolver_async.model import lora, policy


def load(config: Config, device: str) -> PreTrainedModel:
    """That of `policy.path`, with fresh adapters where `policy.lora` asks for them.

    ModelError for a broken directory, for a model that cannot do with its rows packed or its layers
    recomputed what was asked for, or for adapters that do not fit it.
    """
    settings = config.policy
    model = policy.load_model(settings.path, dtype=settings.dtype, device=device)
    if config.learner.packing:
        policy.check_packing(model)
    if config.learner.gradient_checkpointing:
        policy.checkpoint_layers(model)
    if settings.lora.rank:
        lora.inject(
            model,
            rank=settings.lora.rank,
            alpha=settings.lora.alpha,
            targets=settings.lora.targets,
            seed=config.run.seed,
        )
    return model
