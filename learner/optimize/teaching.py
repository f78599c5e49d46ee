"""Distillation from a teacher: a frozen model, or an endpoint, scores the tokens that train.

Three forms, by what is known of the teacher: the whole vocabulary (a directory with the policy's
tokenizer), its likeliest tokens and the rest as one (an endpoint), and the log-probs of chunks of
text (a directory with another tokenizer). Formulas: docs/algorithms.md, Teachers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from evolver_async.config import Config, TeacherConfig
from evolver_async.model import policy
from evolver_async.model.projection import TokenMasks
from evolver_async.schema import Array
from learner.data.aligned import Texts, align
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.loss.divergence import chunk_gaps, divergence, listed, with_rest
from learner.loss.terms import token_scale
from learner.optimize.distillation import ComparedReadout, compared, from_hidden
from learner.optimize.logprobs import Scorer
from learner.optimize.teacher import Teacher
from learner.optimize.teacher_endpoint import TeacherEndpoint
from learner.ranks.mesh import Ranks, idle, within

TEACHER_KL, TEACHER_TOKENS = "teacher/kl", "teacher/tokens"


class StudentPass(NamedTuple):
    """Pass of the policy over a micro-batch: hidden states behind which ACTION tokens are
    predicted, their log-probs, and what the teacher's `read` computed."""

    model: torch.nn.Module
    hidden_ND: torch.Tensor
    theta_N: torch.Tensor
    micro: MicroBatch
    known: torch.Tensor | None


Compared = tuple[torch.Tensor, torch.Tensor, int]


class Known:
    """Knowledge of a teacher about the tokens of a step."""

    def read(self, micro: MicroBatch | None) -> torch.Tensor | None:
        """Compute what a micro-batch needs before the student's pass; all ranks call it."""
        return None

    def compare(self, student: StudentPass) -> Compared:
        """Return the loss of each ACTION token, its divergence, and the number of tokens that the
        teacher knows."""
        raise NotImplementedError


@dataclass(frozen=True)
class Vocabulary(Known):
    """The whole vocabulary, by a pass of the teacher over each micro-batch."""

    settings: TeacherConfig
    chunk: int
    teacher: Teacher

    @torch.no_grad()
    def read(self, micro: MicroBatch | None) -> torch.Tensor | None:
        model, ranks = self.teacher.model, self.teacher.ranks
        if micro is None:
            idle(model, ranks.device, packed=self.teacher.packed)
            return None
        rows = micro.tokens_BT, micro.borders, micro.read_K
        return within(model, partial(policy.hidden_states, model, *rows))[micro.source_N]

    def compare(self, student: StudentPass) -> Compared:
        assert student.known is not None
        heat, kind, beta = self.settings.temperature, self.settings.divergence, self.settings.beta
        compare = partial(from_hidden, self.teacher.head, heat, kind, beta)
        readout = ComparedReadout([student.known], student.micro.masks_N, heat, compare)
        given = readout, self.chunk, student.micro.context
        found_N = compared(student.model, student.hidden_ND, *given)
        return found_N, found_N.detach(), len(found_N)


@dataclass(frozen=True)
class Likeliest(Known):
    """The likeliest tokens before each ACTION token, int64[N, K], and their log-probs."""

    settings: TeacherConfig
    chunk: int
    token_NK: Array
    logp_NK: Array

    def compare(self, student: StudentPass) -> Compared:
        def compare(
            logits_NV: torch.Tensor,
            masks: TokenMasks | None,
            token_NK: torch.Tensor,
            log_p_NK: torch.Tensor,
        ) -> torch.Tensor:
            log_q_NK = listed(logits_NV, token_NK)
            settings = self.settings
            return divergence(with_rest(log_p_NK), log_q_NK, settings.divergence, settings.beta)

        listed_NK = [student.micro.of(self.token_NK), student.micro.of(self.logp_NK)]
        # The endpoint knows nothing of grammars: both are compared without.
        given = ComparedReadout(listed_NK, None, 1.0, compare), self.chunk, student.micro.context
        found_N = compared(student.model, student.hidden_ND, *given)
        return found_N, found_N.detach(), len(found_N)


@dataclass(frozen=True)
class Chunks(Known):
    """The log-probs of chunks of text; chunk_N: those of our ACTION tokens, -1 without one."""

    chunk_N: Array
    logp_C: Array

    def compare(self, student: StudentPass) -> Compared:
        theta_N, chunk_N = student.theta_N, student.micro.of(self.chunk_N)
        teacher_C = torch.from_numpy(self.logp_C).to(theta_N.device)
        gap_M, first_M = chunk_gaps(theta_N, chunk_N, teacher_C)
        none_N = torch.zeros_like(theta_N)
        loss_N = none_N.index_add(0, first_M, gap_M**2 / 2)
        return loss_N, none_N.index_add(0, first_M, gap_M.detach()), int((chunk_N >= 0).sum())


@dataclass(frozen=True)
class Teaching:
    """Loss coef · agg(D) beside the stage's own; agg is that of the policy loss."""

    settings: TeacherConfig
    aggregation: str
    norm_tokens: int
    known: Known

    def __call__(
        self, student: StudentPass, minibatch: Minibatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch and its terms: `TEACHER_KL` is a sum over tokens,
        `TEACHER_TOKENS` their number."""
        loss_N, found_N, tokens = self.known.compare(student)
        scale_N = token_scale(
            self.aggregation,
            student.micro.length_N,
            tokens=minibatch.tokens,
            trajectories=minibatch.trajectories,
            norm_tokens=self.norm_tokens,
        )
        loss = (scale_N * loss_N).sum()
        terms = {"loss/teacher": loss.detach(), TEACHER_KL: found_N.sum()}
        return self.settings.coef * loss, terms | {TEACHER_TOKENS: torch.tensor(float(tokens))}


def teaching_of(
    stage: Config,
    batch: Batch,
    aggregation: str,
    teacher: Teacher | None,
    score: Scorer,
    ours: PreTrainedTokenizerBase,
) -> Teaching:
    """Ask the teacher for what is to be known of a batch before the updates."""
    settings, chunk = stage.teacher, stage.learner.logprob_chunk
    if settings.url:
        known = _likeliest(settings, chunk, batch, score.ranks, ours)
    else:
        assert teacher is not None, "a stage with a teacher was entered without one"
        if teacher.texts is None:
            known = Vocabulary(settings, chunk, teacher)
        else:
            known = _chunks(settings, batch, teacher, teacher.texts, score)
    return Teaching(settings, aggregation, stage.loss.norm_tokens, known)


def _likeliest(
    settings: TeacherConfig,
    chunk: int,
    batch: Batch,
    ranks: Ranks,
    ours: PreTrainedTokenizerBase,
) -> Likeliest:
    """Ask for rows, each rank for its share of them."""
    rows = len(batch.row_start_R) - 1
    asked = range(ranks.rank, rows, ranks.count)
    tokens = [batch.tokens[slice(*batch.row_start_R[row : row + 2])] for row in asked]
    action = [batch.action[slice(*batch.row_start_R[row : row + 2])] for row in asked]
    token_NK = np.zeros((len(batch.mu_N), settings.top_k), np.int64)
    logp_NK = np.zeros((len(batch.mu_N), settings.top_k), np.float32)
    decode = partial(ours.decode, clean_up_tokenization_spaces=False)
    found = TeacherEndpoint(settings).top(
        [one.tolist() for one in tokens], lambda token: str(decode([token]))
    )
    for row, action_T, (token_TK, logp_TK) in zip(asked, action, found, strict=True):
        own = slice(*batch.action_start_R[row : row + 2])
        token_NK[own], logp_NK[own] = token_TK[action_T[1:]], logp_TK[action_T[1:]]
    ranks.sum(token_NK, logp_NK)
    return Likeliest(settings, chunk, token_NK, logp_NK)


def _chunks(
    settings: TeacherConfig, batch: Batch, teacher: Teacher, texts: Texts, score: Scorer
) -> Chunks:
    """Score the batch in the teacher's tokens."""
    aligned = align(batch, texts)
    logp_C = np.zeros(aligned.chunks, np.float32)
    if aligned.batch is not None:
        scored = replace(score, temperature=settings.temperature)
        logp_N = scored(teacher.model, aligned.batch.whole())
        logp_C = np.bincount(aligned.their_chunk_N, logp_N, aligned.chunks).astype(np.float32)
    return Chunks(aligned.chunk_N, logp_C)
