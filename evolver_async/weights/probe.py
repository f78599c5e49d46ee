"""Proof that weights arrived: the log-probs of a fixed text travel with the weights that give them.

The policy writes the text itself, once: rounding in bfloat16 is two to three times larger at tokens
that it would hardly sample. The learner adds a probe to every version as two named tensors, so that
it passes through every channel and its checksums. An actor scores the same tokens with its engine
after it has adopted the version, and compares. Both ends.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from evolver_async.model.rows.borders import Borders
from evolver_async.randomness import key
from evolver_async.weights.channel.weight_source import Part, WeightSource, WholeTensors

TOKENS, LOGPROBS = "probe.tokens", "probe.logprobs"
LENGTH = 24  # tokens of the text
# Mean differences per token of two implementations with the same weights: at most, and at least.
# Of SmolLM2-135M in bfloat16 0.03 to 0.06 on texts of its own, 0.06 to 0.17 on random tokens.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
NOISE = {"float32": 2e-5, "bfloat16": 5e-3}


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text and the log-prob of each of its tokens but the first, at temperature 1."""

    tokens: list[int]
    logprobs: list[float]


Compute = Callable[[Callable[[], Tensor]], Tensor]  # calls a pass of a model, which may be sharded


@torch.no_grad()
def write(
    model: nn.Module,
    seed: int,
    max_length: int,
    *,
    packed: bool,
    within: Compute = lambda compute: compute(),
) -> list[int]:
    """Sample the probe's text from the model, behind a token that `seed` draws.

    All ranks of a sharded model call this together. `max_length`: tokens of context, of which an
    engine needs one for a token of its own. `packed`: True if the model's rows are packed.
    """
    from evolver_async.model import policy  # imports transformers, which receivers do without

    vocabulary = getattr(model, "config").vocab_size  # noqa: B009 (a Module types it as a Tensor)
    generator = torch.Generator().manual_seed(key(seed, "probe"))
    tokens = torch.randint(0, vocabulary, (1,), generator=generator).tolist()
    head = policy.split_model(model)[1]
    while len(tokens) < max(2, min(LENGTH, max_length - 1)):
        tokens_1T, borders = _row(model, tokens, packed)
        next_V = within(
            lambda row=tokens_1T, ends=borders: head(policy.hidden_states(model, row, ends)[:, -1])[
                0
            ]
        )
        chances_V = next_V.float().softmax(-1).cpu()
        tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return tokens


@torch.no_grad()
def measure(model: nn.Module, tokens: list[int], *, packed: bool) -> Probe:
    """Score the text that `write` made. All ranks of a sharded model call this together."""
    from evolver_async.model import policy  # as in `write`

    tokens_1T, borders = _row(model, tokens, packed)
    mask_1T = torch.ones_like(tokens_1T)
    logprobs_1T, _ = policy.token_logprobs(model, tokens_1T, mask_1T, borders=borders)
    return Probe(tokens, logprobs_1T[0, 1:].tolist())


def _row(model: nn.Module, tokens: list[int], packed: bool) -> tuple[Tensor, Borders | None]:
    """Return tokens_1T on the model's device, and its borders if rows are packed."""
    tokens_1T = torch.tensor([tokens], device=next(model.parameters()).device)
    return tokens_1T, Borders.of([len(tokens)], tokens_1T.device) if packed else None


def add(tensors: Mapping[str, Tensor], probe: Probe) -> dict[str, Tensor]:
    """Return the weights with the probe beside them."""
    return {**tensors, **_carried(probe)}


def _carried(probe: Probe) -> dict[str, Tensor]:
    return {TOKENS: torch.tensor(probe.tokens), LOGPROBS: torch.tensor(probe.logprobs)}


class ProbedWeights:
    """Source of weights with their probe beside them; see `channel.source.WeightSource`."""

    def __init__(self, source: WeightSource, probe: Probe) -> None:
        self._source, self._probe = source, WholeTensors(_carried(probe))
        self.layout = source.layout.followed_by(self._probe.layout)
        self.on_host = source.on_host

    def parts(self) -> Iterator[list[Part]]:
        yield from self._source.parts()
        yield from self._probe.parts()


def separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Probe | None]:
    """Return the weights without their probe, and the probe if they have one."""
    weights = dict(tensors)
    tokens, logprobs = weights.pop(TOKENS, None), weights.pop(LOGPROBS, None)
    if tokens is None or logprobs is None:
        return weights, None
    return weights, Probe(tokens.tolist(), logprobs.tolist())


@dataclass(frozen=True)
class ScoredProbe:
    """A probe and the log-probs that an engine gave its tokens."""

    probe: Probe
    logprobs: list[float]

    def difference(self) -> float:
        """Return the mean distance of the engine's log-probs from the learner's, in nats."""
        return _distance(self.logprobs, self.probe.logprobs)


def fault(now: ScoredProbe, before: ScoredProbe | None, dtype: str) -> str:
    """Return the reason why the engine cannot hold the weights of `now`, "" if there is none.

    `before`: the version adopted before. Large errors are seen at once. Smaller ones, below the
    differences of two implementations in bfloat16, are seen by the change: an engine without the
    new weights still gives the log-probs of the old ones.
    """
    error = now.difference()
    if not error <= TOLERANCE[dtype]:
        return f"log-probs differ by {error:.2g} on average"
    if before is None or before.probe.tokens != now.probe.tokens:
        return ""
    pairs = zip(now.probe.logprobs, before.probe.logprobs, strict=True)
    changed = sum(new != old for new, old in pairs) / len(now.logprobs)
    if now.logprobs == before.logprobs and changed > 0.5 and error > 0:
        return "log-probs are still those of the version before"
    moved = _distance(now.probe.logprobs, before.probe.logprobs)
    if moved > NOISE[dtype] and _distance(now.logprobs, before.probe.logprobs) < error / 2:
        return f"log-probs are nearer to the version before, {moved:.2g} away"
    return ""


def _distance(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
