"""Gradients of `experience.internalise: distill`: passes over both contexts of the same tokens.

The teacher's pass is without gradient and precedes the student's, by the weights of the update or
by those of the reference (`experience.distill_teacher`).

The teacher's context alone holds the experience, and every token is compared over the whole
vocabulary. `experience.distill_on` decides who has sampled the tokens.
`bare` is OPCD, arXiv 2602.12275: the student samples, and the reverse KL is taken. Otherwise the
teacher has sampled them, so the forward KL is: the sum of KL(guided || bare) over the tokens of
guided answers estimates the KL between both distributions of whole answers without bias. It also
has a gradient where the bare policy never finds the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from evolver_async.config import Config
from evolver_async.model import policy
from evolver_async.model.projection import TokenMasks, masked, read_out
from evolver_async.model.rows.context import ContextGroup
from learner.data.batch import Batch, MicroBatch, Minibatch, lay_out
from learner.data.packing import Layout
from learner.loss.divergence import divergence
from learner.loss.terms import token_scale
from learner.optimize.critic import CriticTraining
from learner.ranks.mesh import Ranks, idle, nothing, within

DISTILL_KL, DISTILL_TOKENS = "experience/distill_kl", "experience/distill_tokens"


@dataclass(frozen=True)
class Distillation:
    """Loss coef · agg(KL) over the tokens of `taught`, a `Batch.taught`. `kind`: forward, KL(guided
    || bare), or reverse. `reference`: the teacher; None: the model itself.

    agg is that of the policy loss, with the denominators of the whole update; other tokens add 0.
    `chunk`: tokens of one chunk of the vocabulary projections.
    """

    taught: Batch
    kind: str
    coef: float
    temperature: float
    chunk: int
    aggregation: str
    norm_tokens: int
    layout: Layout
    reference: torch.nn.Module | None

    def __call__(
        self, model: torch.nn.Module, minibatch: Minibatch, ranks: Ranks, token_budget: int
    ) -> tuple[float, dict[str, float]]:
        """Accumulate the gradients of an update; return this rank's loss and its terms.

        `DISTILL_KL` is a sum over the rank's tokens, `DISTILL_TOKENS` its share of their number.
        """
        assert self.taught.sampled is not None
        members = minibatch.members[self.taught.length_P[minibatch.members] > 0]
        guided = Minibatch(self.taught.sampled, members)
        total, sum_kl = 0.0, 0.0
        ranks.plan(guided, self.layout, gradient=True)
        for teacher in ranks.passes(guided, token_budget, self.layout):
            if teacher is None:
                idle_gradients(model, ranks, packed=self.layout != "padded")
                continue
            rows_B = teacher.row_B.cpu().numpy()
            student = ranks.shared(lay_out(self.taught, rows_B, ranks.device, self.layout))
            knows = self.reference or model
            with torch.no_grad():
                known_ND = within(knows, partial(_hidden, knows, teacher))
            value, kl = within(model, partial(self._loss, model, student, known_ND, minibatch))
            value = value / ranks.together
            value.backward()
            total += float(value.detach())
            sum_kl += float(kl) / ranks.together
        return total, {
            "loss/distill": total / self.coef,
            DISTILL_KL: sum_kl,
            DISTILL_TOKENS: guided.tokens / ranks.count,
        }

    def _loss(
        self,
        model: torch.nn.Module,
        student: MicroBatch,
        known_ND: torch.Tensor,
        minibatch: Minibatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the student's tokens and the plain sum of their KL.

        known_ND: the teacher's hidden states behind which the same tokens are predicted.
        """
        kl_N = self._divergence(model, known_ND, _hidden(model, student), student)
        scale_N = token_scale(
            self.aggregation,
            student.length_N,
            tokens=minibatch.tokens,
            trajectories=minibatch.trajectories,
            norm_tokens=self.norm_tokens,
        )
        return self.coef * (scale_N * kl_N).sum(), kl_N.detach().sum()

    def _divergence(
        self,
        model: torch.nn.Module,
        known_ND: torch.Tensor,
        hidden_ND: torch.Tensor,
        micro: MicroBatch,
    ) -> torch.Tensor:
        """Compute the KL of every token."""
        _, head = policy.split_model(model)
        heat = self.temperature or 1.0  # log-probs of greedy decoding are those of temperature 1
        if self.reference is not None:
            _, known_head = policy.split_model(self.reference)
        else:
            known_head = head
        compare = partial(from_hidden, known_head, heat, self.kind, 0.5)
        readout = ComparedReadout([known_ND], micro.masks_N, heat, compare)
        return compared(model, hidden_ND, readout, self.chunk, micro.context)


@dataclass(frozen=True)
class ComparedReadout:
    """Divergences of the student's logits from what is known of every token.

    known: tensors with an entry for each token. compare: (logits_NV, masks of the tokens, *known).
    """

    known: list[torch.Tensor]
    masks: TokenMasks | None
    temperature: float
    compare: Callable[..., torch.Tensor]

    def prepare(self, logits_NV: torch.Tensor, rows: slice) -> torch.Tensor:
        scaled_NV = logits_NV.float() / self.temperature
        masks = self._masks(rows)
        return scaled_NV if masks is None else masked(scaled_NV, *masks)

    def values(self, prepared_NV: torch.Tensor, rows: slice) -> tuple[torch.Tensor, ...]:
        known = (one[rows] for one in self.known)
        return (self.compare(prepared_NV, self._masks(rows), *known),)

    def gradient(
        self,
        prepared_NV: torch.Tensor,
        rows: slice,
        by_values: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        with torch.enable_grad():
            (found_N,) = self.values(prepared_NV.requires_grad_(), rows)
        (by_prepared_NV,) = torch.autograd.grad(found_N, prepared_NV, by_values[0])
        return (by_prepared_NV / self.temperature).to(dtype)

    def _masks(self, rows: slice) -> TokenMasks | None:
        return None if self.masks is None else self.masks.of(self.masks.mask_N[rows])


def compared(
    model: torch.nn.Module,
    hidden_ND: torch.Tensor,
    readout: ComparedReadout,
    chunk: int,
    context: ContextGroup | None,
) -> torch.Tensor:
    """Compare the student's logits in chunks, which the backward pass computes again; float32[N].

    hidden_ND: the student's hidden states behind which the tokens are predicted; `context`: the
    ranks that share them.
    """
    _, head = policy.split_model(model)
    (found_N,) = read_out(head, hidden_ND, readout, chunk, heads=2, context=context)
    return found_N


def from_hidden(
    head: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    kind: str,
    beta: float,
    student_NV: torch.Tensor,
    masks: TokenMasks | None,
    known_ND: torch.Tensor,
) -> torch.Tensor:
    """Return the divergence of a chunk from what a teacher's `head` makes of its hidden states.

    Models of one family can have heads of different sizes, padded beyond the tokenizer: only tokens
    that both have are compared.
    """
    with torch.no_grad():
        teacher_NV = head(known_ND)[:, : student_NV.shape[1]].float() / temperature
        teacher_NV = teacher_NV if masks is None else masked(teacher_NV, *masks)
    log_q_NV = student_NV[:, : teacher_NV.shape[1]].log_softmax(-1)
    return divergence(teacher_NV.log_softmax(-1), log_q_NV, kind, beta)


def distillation_of(
    stage: Config,
    batch: Batch,
    critic: CriticTraining | None,
    layout: Layout,
    reference: torch.nn.Module | None,
) -> Distillation | None:
    """Set up the teaching of the contexts without experience.

    None if the batch has none, or while the critic warms up, which leaves the policy unchanged.
    """
    if batch.taught is None or (critic is not None and critic.warms_up):
        return None
    return Distillation(
        batch.taught,
        "reverse" if stage.experience.distill_on == "bare" else "forward",
        stage.experience.distill_coef,
        stage.rollout.temperature,
        stage.learner.logprob_chunk,
        stage.loss.aggregation,
        stage.loss.norm_tokens,
        layout,
        reference if stage.experience.by_reference else None,
    )


def idle_gradients(model: torch.nn.Module, ranks: Ranks, *, packed: bool) -> None:
    """Take part in the two passes of the other ranks."""
    with torch.no_grad():
        idle(model, ranks.device, packed=packed)
    value = within(model, lambda: 0 * nothing(model, ranks.device, packed=packed)[1].sum())
    value.backward()


def _hidden(model: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Compute the hidden states from which the ACTION tokens are predicted, in their order."""
    hidden_KD = policy.hidden_states(model, micro.tokens_BT, micro.borders, micro.read_K)
    return hidden_KD.index_select(0, micro.source_N)
