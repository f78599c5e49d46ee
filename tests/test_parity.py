"""What a real engine sampled, as the learner sees it, in every turn format and context."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_conformance import RUNNER
from test_contexts import abacus, styled
from test_rollout import RIGHT, Adviser, FakeEngine, corridor, roll_out

from actors.engines.base import Engine
from actors.engines.torch_engine import TorchEngine
from actors.formats.chat import Chat
from actors.progress import Progress
from actors.rollout.episode import Finished
from actors.rollout.group import run_group
from actors.scripted.expert import demonstrate_group
from evolver_async.config import Correction, Loss
from evolver_async.config.learner import by_kind
from evolver_async.model import policy
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import Group, Role, Sampling, Trajectory, WeightId
from learner.data.batch import Batch
from learner.data.collate import Strip, collate, lag_table
from learner.diagnostics.offpolicy import Accounting
from learner.loss.objective import Objective
from learner.loss.sft import sft_loss
from learner.optimize.logprobs import Scorer
from learner.ranks.process_group import alone

CPU = torch.device("cpu")
WEIGHTS = WeightId(lineage=1, step=0)
LENGTH, TEMPERATURE = 640, 1.2
CASES = [
    ("think_answer", "full", 1),
    ("think_answer", "window", 1),
    ("think_answer", "single", 1),
    ("tool_call", "full", 1),
    ("tool_call", "full", 2),
    ("tool_call", "window", 1),
    ("interleaved", "full", 1),
]


class Taught:
    """A tiny policy that mostly writes what the expert does, and what it is then asked to play."""

    heads = 2

    def __init__(self, path: Path, name: str, context: str, count: int) -> None:
        policy.make_tiny(
            path,
            seed=0,
            hidden_size=32,
            layers=1,
            heads=self.heads,
            intermediate_size=64,
            max_length=LENGTH,
        )
        self.model = policy.load_model(path, dtype="float32", device="cpu")
        self.tokenizer = load_tokenizer(path)
        self.how = styled(
            name,
            actions_per_turn=count,
            chat=Chat(self.tokenizer),
            context=context,
            window=1,
            max_length=LENGTH,
            max_turns=4,
        )
        asked = corridor(8) if name == "think_answer" else abacus(8)
        sampling = Sampling(temperature=TEMPERATURE, max_tokens=80)
        self.asked = msgspec.structs.replace(asked, sampling=sampling, guided=[1, 3, 5])
        self.teach(self.shown())

    def shown(self) -> Trajectory:
        """An expert's episode."""
        one = msgspec.structs.replace(self.asked, members=[0], guided=[])
        if self.how.format.tools:
            done: list[Finished] = []
            asyncio.run(demonstrate_group(one, self.how, 1.0, Progress(), done.append))
            return done[0].trajectory
        said = [self.how.chat.tokens_of(RIGHT)] * 3
        return roll_out(one, self.how, FakeEngine({"0/0/0": said}))[0]

    def teach(self, shown: Trajectory) -> None:
        """Until the whole episode is about as likely as not."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        missing = torch.inf
        while missing > 0.7:
            missing = 0.0
            for sequence in shown.sequences:
                tokens_BT = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
                action_BT = torch.from_numpy(sequence.roles == Role.ACTION)[None]
                logprobs_BT, _ = policy.token_logprobs(
                    self.model, tokens_BT, torch.ones_like(tokens_BT), select_BT=action_BT
                )
                loss = sft_loss(logprobs_BT[action_BT], tokens=1)
                missing += loss.item()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def engine(self) -> Engine:
        """One with this policy's weights as WEIGHTS."""
        return TorchEngine(
            self.model,
            self.tokenizer,
            weights=WEIGHTS,
            slots=8,
            max_length=LENGTH,
            prefill_tokens=4096,
            in_flight="keep",
        )

    def play(self, *members: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Episodes of these members or all, in their order, and what the engine counted."""
        asked = msgspec.structs.replace(self.asked, members=list(members or range(8)))
        done: list[Finished] = []
        engine = self.engine()

        async def run() -> dict[str, float]:
            try:
                await run_group(
                    asked, self.how, engine, Progress(), done.append, Adviser("go right")
                )
            finally:
                await engine.close()
            return engine.stats()

        counted = RUNNER.run(run())
        found = [finished.trajectory for finished in done]
        return sorted(found, key=lambda trajectory: trajectory.member), counted

    def batch(self, trajectories: list[Trajectory]) -> Batch:
        group = Group(
            group_id=0,
            task=self.asked.task,
            kind="rollout",
            stage=0,
            use=0,
            trajectories=trajectories,
        )
        return collate([group], lag_table([group], WEIGHTS, {}), Strip("never", 0.0, 0))


@pytest.fixture
def taught(request: pytest.FixtureRequest, tmp_path: Path) -> Taught:
    return Taught(tmp_path / "policy", *request.param)


@pytest.mark.parametrize("taught", CASES, ids=str, indirect=True)
def test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with(taught: Taught) -> None:
    trajectories, _ = taught.play()
    assert any(one.success for one in trajectories)
    assert [any(s.guided for s in one.sequences) for one in trajectories] == [
        one.member in taught.asked.guided for one in trajectories
    ]
    several = max(len(one.sequences) for one in trajectories) > 1
    assert several == (taught.how.context == "single") or taught.how.context == "window"
    batch = taught.batch(trajectories)
    score = Scorer(TEMPERATURE, token_budget=4096, chunk=4096, ranks=alone("cpu"))
    theta_N = score(taught.model, batch.whole())
    assert len(theta_N) == sum(one.action_tokens for one in trajectories)
    np.testing.assert_allclose(theta_N, batch.mu_N, atol=1e-4)
    assert batch.mu_N.min() < -1, "some of what was sampled was unlikely"


def loss_and_gradient(
    taught: Taught, batch: Batch, labels_BT: torch.Tensor | None
) -> tuple[list[float], list[torch.Tensor]]:
    """Supervised and rl loss of one micro-batch, whose hidden states are those of its own tokens,
    and its gradients; the tokens to be predicted may be others."""
    minibatch = batch.whole()
    (micro,) = minibatch.micro_batches(1 << 20, CPU)
    hidden_BTD = policy.hidden_states(taught.model, micro.tokens_BT)
    theta_BT, entropy_BT = policy.token_logprobs(
        taught.model,
        micro.tokens_BT if labels_BT is None else labels_BT,
        micro.attention_BT,
        TEMPERATURE,
        select_BT=micro.action_BT,
        hidden_BTD=hidden_BTD,
    )
    theta_N, entropy_N = theta_BT[micro.action_BT], entropy_BT[micro.action_BT]
    settings = by_kind(Correction(kind="ppo"), Loss(kl_coef=0))
    objective = Objective(*settings, interpolates=False, boosts=False)
    rl, _ = objective(theta_N, entropy_N, micro, minibatch, Accounting())
    supervised = sft_loss(theta_N, tokens=minibatch.tokens)
    gradients = torch.autograd.grad(rl + supervised, list(taught.model.parameters()))
    return [rl.item(), supervised.item()], list(gradients)


@pytest.mark.parametrize(
    "taught",
    [CASES[1], CASES[3], CASES[6]],
    ids=str,
    indirect=True,
)
def test_the_label_of_an_environment_token_never_reaches_the_loss(taught: Taught) -> None:
    trajectories, _ = taught.play()
    batch = taught.batch(trajectories)
    batch.spread_advantages(np.linspace(-1, 1, len(batch.turn_reward_U)))
    (micro,) = batch.whole().micro_batches(1 << 20, CPU)
    random_BT = torch.randint(
        len(taught.tokenizer), micro.tokens_BT.shape, generator=torch.Generator().manual_seed(0)
    )
    theirs_BT = torch.where(micro.action_BT, micro.tokens_BT, random_BT)
    assert (theirs_BT != micro.tokens_BT).any()
    losses, gradients = loss_and_gradient(taught, batch, None)
    again, others = loss_and_gradient(taught, batch, theirs_BT)
    assert losses == again
    assert all(map(torch.equal, gradients, others))
    own_BT = torch.where(micro.action_BT, random_BT, micro.tokens_BT)
    changed, _ = loss_and_gradient(taught, batch, own_BT)
    assert changed[0] != losses[0] and changed[1] != losses[1]


@pytest.mark.parametrize("taught", [CASES[6]], ids=str, indirect=True)
def test_code_that_was_run_costs_no_second_reading(taught: Taught) -> None:
    """The stream only grows, so what was read or written before a pause is never read again: new
    are the output and the token that completed the closing tag."""
    paused = 0
    for member in range(8):
        (trajectory,), counted = taught.play(member)
        (sequence,) = trajectory.sequences
        turns = len(trajectory.turn_rewards)
        read = int((sequence.roles != Role.ACTION).sum())
        assert counted["prefilled"] <= read + turns
        assert counted["generated"] == trajectory.action_tokens
        paused += turns > 1
    assert paused > 0
