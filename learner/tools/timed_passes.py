"""Pace of a model: passes of the learner and a decode of the engine, timed within seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.launch.pace import Pace
from evolver_async.launch.registry import resolve
from evolver_async.model import policy
from evolver_async.model.precision import stopwatch
from evolver_async.model.rows.borders import Borders
from learner.loss.correction import facts_of
from learner.optimize import model as models
from learner.optimize.adamw import make_adamw

LAYERS = 4  # that are timed; a step runs all of them
FEW_TOKENS, TOKENS = 32, 256  # of two passes, whose difference tells the time of a token
SCORED = 64  # tokens of the pass through the vocabulary
MOST_PARAMETERS = 2e9  # of a larger model a CPU decodes too slowly for a start
UPDATED = 1 << 22  # parameters that the timed update moves


def timed(config: Config, model: PreTrainedModel, prompt: int) -> Pace | None:
    """Time a model of `models.fit`, which is of no use afterwards. `prompt`: tokens of one."""
    parameters = sum(one.numel() for one in model.parameters())
    if parameters > MOST_PARAMETERS:
        return None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(config.engine.threads)
        rows, decode_s = resolve("decode_times")(config, model)
        torch.set_num_threads(config.learner.threads)
        forward_s, backward_s = _token_times(config, model)
        update_s = _update_s(config, model)
    finally:
        torch.set_num_threads(threads)
    shares = models.layout_of(config, model) == "tree"
    return Pace(rows, decode_s, forward_s, backward_s, update_s, _scores(config), shares, prompt)


def _scores(config: Config) -> float:
    """Return the forward passes without gradient of a token in the first stage that has rewards."""
    for index, written in enumerate(config.stages):
        if written.kind == "rl":
            stage = stage_config(config, index)
            # the first update gives the anchor of its own tokens
            reads = facts_of(stage.correction).reads_anchor
            return reads * (1 - 1 / stage.learner.minibatches) + (stage.loss.kl_coef > 0)
    return 0.0


def _token_times(config: Config, model: PreTrainedModel) -> tuple[float, float]:
    """Return the seconds of a token in a forward pass of a micro-batch, and in its backward pass.

    What a pass costs whatever its length, as the sums of gradients, has no part in it.
    """
    decoder, _ = policy.split_model(model)
    longest = min(TOKENS, config.policy.max_length)
    few = min(FEW_TOKENS, max(1, longest // 4))
    with _fewer_layers(decoder) as factor:
        _layers_times(config, model, few)  # allocates the gradients
        least, most = (_layers_times(config, model, count) for count in (few, longest))
    hidden_ND = torch.randn(SCORED, model.config.hidden_size, requires_grad=True)
    with stopwatch() as forward_s:
        found_N, entropy_N = policy.target_logprobs(
            *(model, hidden_ND, torch.arange(SCORED) % model.config.vocab_size),
            *(1.0, config.learner.logprob_chunk),
            with_entropy=True,
        )
    with stopwatch() as backward_s:
        (found_N + entropy_N).sum().backward()
    sides = zip(least, most, (forward_s(), backward_s()), strict=True)
    forward, backward = (
        max((long - short) / (longest - few), long / longest / 2) * factor + head / SCORED
        for short, long, head in sides
    )
    return forward, backward


@contextmanager
def _fewer_layers(decoder: Any) -> Iterator[float]:
    """Run only the first layers of a decoder; yield what is to be multiplied for all of them."""
    layers = decoder.config.num_hidden_layers
    decoder.config.num_hidden_layers = min(LAYERS, layers)
    try:
        yield layers / min(LAYERS, layers)
    finally:
        decoder.config.num_hidden_layers = layers


def _layers_times(config: Config, model: PreTrainedModel, tokens: int) -> tuple[float, float]:
    """Return the seconds of the decoder's forward pass over a row, and of its backward pass."""
    row_1T = (torch.arange(tokens) % model.config.vocab_size)[None]
    borders = Borders.of([tokens], row_1T.device) if config.learner.packing else None
    with stopwatch() as forward_s:
        hidden_BTD = policy.hidden_states(model, row_1T, borders)
    with stopwatch() as backward_s:
        hidden_BTD.sum().backward()
    return forward_s(), backward_s()


def _update_s(config: Config, model: PreTrainedModel) -> float:
    """Return the seconds of an update of all trained parameters, by one of some of them."""
    trained = [one for one in model.parameters() if one.requires_grad]
    some, count = list[torch.nn.Parameter](), 0
    for one in trained:
        if one.grad is not None and count < UPDATED:
            some.append(one)
            count += one.numel()
    learner = config.learner
    betas = learner.betas[0], learner.betas[1]
    optimizer = make_adamw(some, betas=betas, eps=learner.eps, weight_decay=0.0)
    optimizer.step()  # allocates the moments
    with stopwatch() as passed_s:
        optimizer.step()
    return passed_s() * sum(map(torch.numel, trained)) / count
