"""Gradients of a teacher against one plain forward pass per row; its endpoint; other tokenizers."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from http_server import HttpServer, Reply, raw
from transformers import PreTrainedModel
from updates import FORKS, config, groups, step, updater

from evolver_async.config import Config, StageConfig, TeacherConfig
from evolver_async.config.load import stage_config
from evolver_async.errors import TrainingError
from evolver_async.model import policy
from evolver_async.schema import Group, Role, VersionRun, WeightId
from learner.data.batch import Batch
from learner.loss.accounting import Accounting
from learner.loss.divergence import divergence
from learner.optimize import teacher as under_test
from learner.optimize.teaching import Teaching, teaching_of
from learner.state import LearnerState
from learner.step import Updater

HEAD = WeightId(lineage=1, step=0)
KINDS = ("forward", "reverse", "jsd")
WORDS = ["phoen", "fro", "gon", "zen"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student, a larger teacher with its tokenizer, and one with another tokenizer."""
    directory = tmp_path_factory.mktemp("teaching")
    sizes = {"heads": 2, "max_length": 64}
    small, large = {"hidden_size": 16, "layers": 1}, {"hidden_size": 24, "layers": 2}
    for name, made, words in (
        ("student", small, []),
        ("teacher", large, []),
        ("other", large, WORDS),
    ):
        policy.make_tiny(
            directory / name, seed=len(name), intermediate_size=32, words=words, **made, **sizes
        )
    return {name: directory / name for name in ("student", "teacher", "other")}


def settings_of(paths: dict[str, Path], kind: str = "rl", **teacher: Any) -> Config:
    given = {"path": str(paths["teacher"])} | teacher
    settings = config(paths["student"], [StageConfig(kind=kind, steps=8)], minibatches=1)
    settings.teacher = TeacherConfig(**given)
    settings.policy.max_length = settings.learner.token_budget = 32
    return settings


def entered(settings: Config, directory: Path) -> Updater:
    made = updater(settings, directory)
    made.enter(stage_config(settings, 0), LearnerState(lineage=1))
    return made


def drawn(count: int) -> list[Group]:
    """Groups of one member with random tokens after the same prompt."""
    found, draws = groups(count, length=6), np.random.default_rng(0)
    for group in found:
        (sequence,) = group.trajectories[0].sequences
        sequence.tokens[1:] = draws.integers(10, 200, 5)
    return found


def taught(made: Updater, data: list[Group]) -> tuple[Batch, Teaching]:
    stage = stage_config(made.config, 0)
    batch = made.collate(data, stage.experience, HEAD, FORKS, whole=False)
    given = stage, batch, stage.loss.aggregation, made.teacher, made._scorer(stage), made.tokenizer
    return batch, teaching_of(*given)


def gradients(made: Updater, batch: Batch, teaching: Teaching) -> tuple[dict[str, float], Any]:
    """Terms and gradients of the teacher's part alone."""
    made.model.zero_grad(set_to_none=True)

    def nothing(theta_N: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return 0 * theta_N.sum(), {}

    stage = stage_config(made.config, 0)
    given = stage, batch.whole(), nothing, Accounting(), None, None, teaching
    _, terms = made.stepper.passes.gradients(*given)
    return terms, [one.grad.clone() for one in made.model.parameters() if one.grad is not None]


def rows_of(batch: Batch) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Every row's tokens and the places of its ACTION tokens."""
    for row in range(len(batch.row_start_R) - 1):
        inside = slice(*batch.row_start_R[row : row + 2])
        tokens_1T = torch.from_numpy(batch.tokens[inside].astype(np.int64))[None]
        yield tokens_1T, np.flatnonzero(batch.action[inside]).tolist()


def log_probs(model: PreTrainedModel, tokens_1T: torch.Tensor, heat: float = 1.0) -> torch.Tensor:
    return (model(input_ids=tokens_1T).logits[0].float() / heat).log_softmax(-1)


def loaded(path: Path) -> PreTrainedModel:
    return policy.load_model(path, dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "chunk"), [("padded", 4096), ("packed", 3), ("tree", 3)])
def test_loss_and_gradients_match_a_pass_per_row(paths, tmp_path, kind, layout, chunk):
    settings = settings_of(paths, divergence=kind, beta=0.3, temperature=0.8, coef=0.7)
    settings.learner.packing = layout != "padded"
    settings.learner.prefix_trees = "always" if layout == "tree" else "never"
    settings.learner.logprob_chunk = chunk
    made = entered(settings, tmp_path)
    batch, teaching = taught(made, drawn(5))
    terms, ours = gradients(made, batch, teaching)

    student, teacher = loaded(paths["student"]), loaded(paths["teacher"])
    total, tokens = torch.zeros(()), batch.whole().tokens
    for tokens_1T, places in rows_of(batch):
        with torch.no_grad():
            p_LV = log_probs(teacher, tokens_1T, 0.8)
        q_LV = log_probs(student, tokens_1T, 0.8)
        for place in places:
            pair = p_LV[place - 1][None], q_LV[place - 1][None]
            total = total + divergence(*pair, kind, 0.3).sum() / tokens
    (0.7 * total).backward()
    assert terms["loss/teacher"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert terms["teacher/kl"] == pytest.approx(float(total.detach()) * tokens, rel=1e-4)
    assert terms["teacher/tokens"] == tokens > 10 and total.detach() > 1e-4
    theirs = [one.grad for one in student.parameters() if one.grad is not None]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def served(model: PreTrainedModel, texts: Any, calls: list[dict[str, Any]]) -> HttpServer:
    """An endpoint that answers as vLLM: the likeliest tokens of every place, and the prompt's."""

    @torch.no_grad()
    def reply(path: str, headers: dict[str, str], body: Any) -> Reply:
        calls.append({"path": path, **headers, **body})
        if len(calls) == 1:
            return Reply(status=503)
        row = body["prompt"]
        logp_LV = log_probs(model, torch.tensor([row]))
        found: list[Any] = [None]
        for place, token in enumerate(row[1:]):
            top = logp_LV[place].topk(body["prompt_logprobs"]).indices.tolist()
            found.append(
                {
                    str(one): {"logprob": float(logp_LV[place, one]), "decoded_token": texts(one)}
                    for one in {*top, token}
                }
            )
        return raw({"choices": [{"text": "", "prompt_logprobs": found}]})

    return HttpServer(reply)


def test_an_endpoint_gives_the_likeliest_tokens_and_all_others_count_as_one(
    paths, tmp_path, monkeypatch
):
    monkeypatch.setenv("TEACHERS_KEY", "very-secret")
    monkeypatch.setattr("learner.optimize.teacher_endpoint.PAUSE_S", 0.0)
    student, teacher = loaded(paths["student"]), loaded(paths["teacher"])
    tokenizer, calls = policy.load_tokenizer(paths["teacher"]), list[dict[str, Any]]()
    server = served(teacher, lambda token: tokenizer.decode([token]), calls)
    server.start()
    try:
        of_url = {"path": "", "url": f"{server.url}/v1", "model": "m", "key_env": "TEACHERS_KEY"}
        settings = settings_of(paths, **of_url, top_k=4, divergence="forward")
        made = entered(settings, tmp_path)
        batch, teaching = taught(made, drawn(3))
        terms, ours = gradients(made, batch, teaching)
    finally:
        server.end()
    assert calls[0]["authorization"] == "Bearer very-secret"
    assert calls[0]["path"] == "/v1/completions" and len(calls) == 1 + len(batch.row_start_R) - 1

    total = torch.zeros(())
    for tokens_1T, places in rows_of(batch):
        with torch.no_grad():
            p_LV = log_probs(teacher, tokens_1T).exp()
        q_LV = log_probs(student, tokens_1T).exp()
        for place in places:
            p_V, q_V = p_LV[place - 1], q_LV[place - 1]
            top = p_V.topk(4).indices
            pairs = [*zip(p_V[top], q_V[top], strict=True)]
            pairs.append((1 - p_V[top].sum(), 1 - q_V[top].sum()))
            total = total + sum(p * (p / q).log() for p, q in pairs)
    total = total / batch.whole().tokens
    total.backward()
    assert terms["loss/teacher"] == pytest.approx(float(total.detach()), rel=1e-3)
    theirs = [one.grad for one in student.parameters() if one.grad is not None]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Reply(status=404), "status 404"),
        (raw({"choices": [{"text": ""}]}), "prompt_logprobs"),
        (raw({"choices": [{"prompt_logprobs": [None]}]}), "every token"),
    ],
)
def test_an_endpoint_that_is_no_teacher_is_named(paths, tmp_path, answer, said):
    server = HttpServer(lambda *_: answer)
    server.start()
    try:
        settings = settings_of(paths, path="", url=f"{server.url}/v1", model="m", retries=0)
        made = entered(settings, tmp_path)
        with pytest.raises(TrainingError, match=f"teacher.url: .*{said}"):
            taught(made, drawn(2))
    finally:
        server.end()


def test_an_endpoint_with_another_tokenizer_is_refused(paths, tmp_path):
    calls: list[dict[str, Any]] = [{}]
    server = served(loaded(paths["teacher"]), lambda token: f"other {token}", calls)
    server.start()
    try:
        settings = settings_of(paths, path="", url=f"{server.url}/v1", model="m", retries=0)
        with pytest.raises(TrainingError, match=r"teacher\.url: .*another tokenizer"):
            taught(entered(settings, tmp_path), drawn(2))
    finally:
        server.end()


def spoken(made: Updater, texts: list[tuple[str, str]]) -> list[Group]:
    """Groups of one member that says the second text after the first one."""
    found = groups(len(texts))
    for group, (prompt, action) in zip(found, texts, strict=True):
        (sequence,) = group.trajectories[0].sequences
        parts = [made.tokenizer.encode(one, add_special_tokens=False) for one in (prompt, action)]
        roles = np.repeat([Role.PROMPT, Role.ACTION], [len(one) for one in parts])
        acts = roles == Role.ACTION
        sequence.tokens = np.array([*parts[0], *parts[1]], np.int32)
        sequence.roles = roles.astype(np.uint8)
        sequence.turns = np.where(acts, 0, -1).astype(np.int16)
        sequence.logprobs = np.where(acts, -1, 0).astype(np.float32)
        sequence.versions = [VersionRun(weights=HEAD, tokens=int(acts.sum()))]
    return found


TEXTS = [("go to the phoenix", " frozen dragon zen"), ("a", " übermut, phoenix 12")]


def test_a_teacher_with_another_tokenizer_scores_chunks_of_text(paths, tmp_path):
    settings = settings_of(paths, path=str(paths["other"]), coef=0.5, temperature=0.9)
    made = entered(settings, tmp_path)
    batch, teaching = taught(made, spoken(made, TEXTS))
    terms, ours = gradients(made, batch, teaching)

    student, teacher = loaded(paths["student"]), loaded(paths["other"])
    tokenizer, total, gaps = policy.load_tokenizer(paths["other"]), torch.zeros(()), 0.0
    for (prompt, action), (tokens_1T, places) in zip(TEXTS, rows_of(batch), strict=True):
        theirs = tokenizer.encode(prompt + action, add_special_tokens=False)
        texts = [
            [one.decode(row[:end]) for end in range(len(row) + 1)]
            for one, row in ((made.tokenizer, tokens_1T[0].tolist()), (tokenizer, theirs))
        ]
        with torch.no_grad():
            their_LV = log_probs(teacher, torch.tensor([theirs]), 0.9)
        our_LV = log_probs(student, tokens_1T)
        cuts = [
            (i, j)
            for i, mine in enumerate(texts[0])
            for j, other in enumerate(texts[1])
            if mine == other and "\ufffd" not in mine
        ]
        for (a, b), (c, d) in pairwise(cuts):
            if a in places:
                p = sum(their_LV[at - 1, theirs[at]] for at in range(b, d))
                q = sum(our_LV[at - 1, tokens_1T[0, at]] for at in range(a, c))
                total, gaps = total + (q - p) ** 2 / 2, gaps + float(q.detach() - p)
    tokens = batch.whole().tokens
    (0.5 * total / tokens).backward()
    assert terms["loss/teacher"] == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
    assert terms["teacher/kl"] == pytest.approx(gaps, rel=1e-4)
    assert terms["teacher/tokens"] == tokens
    theirs = [one.grad for one in student.parameters() if one.grad is not None]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("loss_coef", [0.0, 1.0])
def test_a_step_moves_the_student_to_its_teacher(paths, tmp_path, kind, loss_coef):
    settings = settings_of(paths, kind, loss_coef=loss_coef)
    settings.learner.lr = 3e-3
    made, data = entered(settings, tmp_path), drawn(4)
    rows = []
    for take in range(8):
        state = LearnerState(lineage=1, take=take)
        found = made.step(kind, stage_config(settings, 0), data, state, FORKS, 8)
        rows.append(found.metrics)
    assert {row["teacher/share"] for row in rows} == {1.0}
    if not loss_coef:
        assert rows[-1]["teacher/kl"] < 0.8 * rows[0]["teacher/kl"]


def test_a_weight_of_zero_is_a_run_without_a_teacher(paths, tmp_path):
    found = []
    for number, teacher in enumerate(({"coef": 0.0, "loss_coef": 0.0}, {"path": ""})):
        settings = settings_of(paths, **teacher)
        made = entered(settings, tmp_path / str(number))
        assert made.teacher is None
        metrics = step(made, drawn(4)).metrics
        assert not any("teacher" in name for name in metrics)
        found.append(policy.state_tensors(made.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_teacher_is_freed_where_no_stage_reads_it(paths, tmp_path):
    settings = settings_of(paths)
    without = {"teacher": {"coef": 0.0}}
    settings.stages.append(StageConfig(kind="rl", steps=1, override=without))
    made = entered(settings, tmp_path)
    assert made.teacher is not None
    made.enter(stage_config(settings, 1), LearnerState(lineage=1, stage=1, entered=1))
    assert made.teacher is None


def test_a_teacher_with_a_shorter_context_is_refused(paths, tmp_path):
    settings = settings_of(paths)
    settings.policy.max_length = 65
    with pytest.raises(policy.ModelError, match=r"teacher.path: .*policy.max_length"):
        under_test.load(settings, str(paths["teacher"]), "cpu", "padded", sharded=False)
