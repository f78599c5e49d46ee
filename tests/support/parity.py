"""Comparison of log-probs of engine and learner."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from abacus_runs import abacus, styled
from engine_conformance import RUNNER
from rollouts import RIGHT, Adviser, FakeEngine, corridor, roll_out

from actors.engines.engine import Engine
from actors.engines.torch_engine import TorchEngine
from actors.formats.chat import Chat
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.scripted.demonstrations import demonstrate_group
from actors.ticket_progress import TicketProgress
from evolver_async.model import policy
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import Group, Role, Sampling, Trajectory, WeightId
from learner.data.batch import Batch
from learner.data.collate import Internalise, collate, lag_table
from learner.loss.sft import sft_loss
from learner.optimize.logprobs import Scorer
from learner.ranks.process_group import alone

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
            asyncio.run(demonstrate_group(one, self.how, 1.0, TicketProgress(), done.append))
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
                    asked, self.how, engine, TicketProgress(), done.append, Adviser("go right")
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
        return collate([group], lag_table([group], WEIGHTS, {}), Internalise(0.0, 0))


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
