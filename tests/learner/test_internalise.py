"""Experience in the weights: what a policy keeps of it, by `experience.internalise`.

Doors have passwords that only the experience names. A door's number is in its prompt, so that a
policy can memorise its password.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from updates import FORKS, updater

from evolver_async.config import (
    AdvantageConfig,
    Config,
    ExperienceConfig,
    LearnerConfig,
    LossConfig,
    MetricsConfig,
    PolicyConfig,
    StageConfig,
)
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.schema import (
    Array,
    Group,
    Role,
    Sequence,
    Task,
    Trajectory,
    VersionRun,
    WeightId,
)
from learner.state import LearnerState
from learner.step import Updater

WEIGHTS = WeightId(lineage=1, step=0)
NAMES = (" phoenix", " dragon", " lake", " cliff")
WORDS = (" ice", " hole", " wall", " goal", " tag", " cell", " row", " map", " box", " code")
PASSWORDS = (" goal ice box", " row code tag", " map hole cell", " wall tag ice")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that repeats the password that it reads, whatever the door, as a large one would."""
    path = tmp_path_factory.mktemp("internalise") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=64, layers=2, heads=2, intermediate_size=128, max_length=64
    )
    model = policy.load_model(path, dtype="float32", device="cpu")
    tokenizer = policy.load_tokenizer(path)
    words = torch.tensor([tokenizer.encode(one, add_special_tokens=False)[0] for one in WORDS])
    names = torch.tensor([tokenizer.encode(one, add_special_tokens=False)[0] for one in NAMES])
    marker = tokenizer.encode(" answer", add_special_tokens=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    draws = torch.Generator().manual_seed(0)
    for _ in range(400):
        said_BK = words[torch.randint(len(words), (64, 3), generator=draws)]
        door_B1 = names[torch.randint(len(names), (64, 1), generator=draws)]
        head_B1 = torch.tensor(marker).expand(64, 1)
        tokens_BT = torch.cat([head_B1, said_BK, door_B1, said_BK], 1)
        optimizer.zero_grad()
        found_BT, _ = policy.token_logprobs(model, tokens_BT, torch.ones_like(tokens_BT))
        loss = -found_BT[:, -3:].mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05
    model.save_pretrained(path)
    return path


class Doors:
    """Trajectories at the doors: the guided member copies the password, the other one fails."""

    def __init__(self, made: Updater) -> None:
        self.made = made
        self.tokenizer = policy.load_tokenizer(made.config.policy.path)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def logprobs(self, before: list[int], action: list[int]) -> Array:
        tokens_BT = torch.tensor([before + action])
        found_BT, _ = policy.token_logprobs(self.made.model, tokens_BT, torch.ones_like(tokens_BT))
        return found_BT[0, len(before) :].numpy().clip(max=0)

    def member(self, group: int, door: int, member: int) -> Trajectory:
        guided = member == 0
        experience = self.encode(" answer" + PASSWORDS[door]) if guided else []
        prompt, action = (
            self.encode(NAMES[door]),
            self.encode(PASSWORDS[door] if guided else " left"),
        )
        before = [*experience, *prompt]
        bare = self.made.config.experience.distill_on == "bare"
        roles = [Role.EXPERIENCE] * len(experience) + [Role.PROMPT] * len(prompt)
        acts = np.array([*roles, *[Role.ACTION] * len(action)], np.uint8)
        one = Sequence(
            tokens=np.array(before + action, np.int32),
            roles=acts,
            turns=np.where(acts == Role.ACTION, 0, -1).astype(np.int16),
            logprobs=np.r_[
                np.zeros(len(before)), self.logprobs(prompt if bare else before, action)
            ].astype(np.float32),
            versions=[VersionRun(weights=WEIGHTS, tokens=len(action))],
        )
        return Trajectory(
            content=0,
            group_id=group,
            member=member,
            attempt=0,
            actor="a",
            incarnation=0,
            sequences=[one],
            reward=float(guided),
            success=guided,
            terminated=True,
            truncated=False,
            turn_rewards=np.array([guided], np.float32),
            turn_flags=np.zeros(1, np.uint8),
            labels=np.zeros(1, np.int8),
            label_source="",
            experience_ids=[],
            policy="learned",
            timing={},
        )

    def groups(self, take: int, count: int) -> list[Group]:
        """`count` groups of a take, at one door after the other."""
        found = []
        for group in range(take * count, (take + 1) * count):
            door = group % len(NAMES)
            task = Task(task_id=f"door{door}", env="doors", split="train", map_seed=0)
            members = [self.member(group, door, member) for member in range(2)]
            made = Group(
                group_id=group, task=task, kind="rollout", stage=0, use=0, trajectories=members
            )
            found.append(made)
        return found

    def memorised(self) -> float:
        """Mean probability that the policy without experience says a training task's password."""
        return self.said("")

    def read(self) -> float:
        """Mean probability of the password by the policy whose context holds it."""
        return self.said(" answer{}")

    def said(self, experience: str) -> float:
        found = [
            self.logprobs(self.encode(experience.format(said) + name), self.encode(said)).sum()
            for name, said in zip(NAMES, PASSWORDS, strict=True)
        ]
        return float(np.exp(found).mean())


def trained(
    reader: Path,
    run_dir: Path,
    *,
    steps: int = 60,
    count: int = len(NAMES),
    minibatches: int = 1,
    lr: float = 3e-3,
    boost: float = 0.0,
    **experience: Any,
) -> tuple[Doors, list[dict[str, float]]]:
    """Train steps of `count` groups; return the metrics of all steps."""
    settings = Config(
        policy=PolicyConfig(path=str(reader), max_length=64),
        experience=ExperienceConfig(kind="contrast", **experience),
        advantage=AdvantageConfig(kind="reinforce", baseline_decay=1.0),  # successes alone train
        learner=LearnerConfig(minibatches=minibatches, warmup_steps=0, decay="none", lr=lr),
        loss=LossConfig(boost=boost),
        metrics=MetricsConfig(samples=0),
        stages=[StageConfig(kind="rl", steps=steps)],
    )
    made = updater(settings, run_dir)
    made.enter(stage_config(settings, 0), LearnerState(lineage=1))
    doors, results, stage = Doors(made), [], stage_config(settings, 0)
    for take in range(steps):
        state = LearnerState(lineage=1, take=take, stage_take=take)
        results.append(
            made.step("rl", stage, doors.groups(take, count), state, FORKS, steps).metrics
        )
    return doors, results


def test_a_policy_that_loses_its_experience_memorises_passwords_and_forgets_to_read(
    reader, tmp_path
):
    doors, results = trained(reader, tmp_path)
    assert doors.memorised() >= 0.5 and doors.read() <= 0.1
    reliance = [found["experience/reliance"] for found in results]
    assert reliance[0] > 1 > 0.01 > reliance[-1]
    assert not any("experience/kept_copied" in found for found in results)


@pytest.mark.parametrize("internalise", ["strip", "distill"])
def test_a_copied_password_is_not_memorised(reader, tmp_path, internalise):
    doors, results = trained(reader, tmp_path, internalise=internalise, keep_copied=6)
    assert doors.memorised() <= 0.01 and doors.read() >= 0.99
    assert all(found["experience/kept_copied"] == 1 for found in results)
    assert not any("loss/distill" in found for found in results)


def test_a_copy_shorter_than_the_bound_is_internalised(reader, tmp_path):
    _, results = trained(reader, tmp_path, steps=1, keep_copied=14)  # characters of no password
    assert results[0]["experience/kept_copied"] == 0 and "experience/reliance" in results[0]


def test_a_guided_policy_teaches_the_bare_one_and_reads_on(reader, tmp_path):
    doors, results = trained(reader, tmp_path, internalise="distill")
    assert doors.memorised() >= 0.5 and doors.read() >= 0.9
    kl = [found["experience/distill_kl"] for found in results]
    assert kl[0] > 1 > 0.1 > kl[-1]
    assert not any("offpolicy_guided/tokens" in found for found in results)
    untaught, _ = trained(reader, tmp_path, internalise="none")
    assert untaught.memorised() <= 0.01


def test_a_bare_policy_is_scored_by_its_context_with_experience(reader, tmp_path):
    """Its tokens train without a correction, as it has sampled them without the experience."""
    how = {"internalise": "distill", "distill_on": "bare", "distill_teacher": "reference"}
    doors, results = trained(reader, tmp_path, loss_coef=0.0, **how)
    assert doors.memorised() >= 0.3
    kl = [found["experience/distill_kl"] for found in results]
    assert kl[-1] < kl[0]
    assert not any("offpolicy_guided/tokens" in found for found in results)


def test_a_reference_teaches_as_it_was_at_the_stages_beginning(reader, tmp_path):
    how = {"internalise": "distill", "distill_teacher": "reference", "loss_coef": 0.0}
    doors, results = trained(reader, tmp_path, **how)
    assert doors.made.reference is not None and doors.memorised() >= 0.5
    kl = [found["experience/distill_kl"] for found in results]
    assert kl[0] > 1 > 0.1 > kl[-1]
    with torch.no_grad():
        for weight in doors.made.model.parameters():
            weight.zero_()  # the policy knows nothing any more, the reference does
    ended = LearnerState(lineage=1, take=60, stage_take=60)
    stage = stage_config(doors.made.config, 0)
    found = doors.made.step("rl", stage, doors.groups(60, 4), ended, FORKS, 61).metrics
    assert found["experience/distill_kl"] > 1


def test_failed_episodes_teach_nothing_where_solved_ones_alone_do(reader, tmp_path, monkeypatch):
    how = {"steps": 1, "internalise": "distill", "distill_on": "solved"}
    _, (solved,) = trained(reader, tmp_path, **how)
    assert solved["experience/distill_kl"] > 1
    member = Doors.member
    monkeypatch.setattr(
        Doors, "member", lambda *given: msgspec.structs.replace(member(*given), success=False)
    )
    _, (failed,) = trained(reader, tmp_path / "failed", **how)
    assert "experience/distill_kl" not in failed


def test_a_loss_of_its_own_beside_it_can_be_left_out(reader, tmp_path):
    how = {"steps": 1, "internalise": "distill"}
    _, (both,) = trained(reader, tmp_path, **how)
    _, (alone,) = trained(reader, tmp_path / "alone", loss_coef=0.0, **how)
    assert alone["loss/distill"] == both["loss/distill"]
    assert alone["loss/grad_norm"] != both["loss/grad_norm"]


def test_a_part_that_keeps_its_context_keeps_reading_alive(reader, tmp_path):
    doors, _ = trained(reader, tmp_path, strip_fraction=0.75)
    assert doors.memorised() >= 0.5 and doors.read() >= 0.9


def test_reliance_weighs_down_answers_that_lean_on_the_experience(reader, tmp_path):
    """At first every password does; a mean of exp(-c x) is at least exp(-c mean x)."""
    _, plain = trained(reader, tmp_path, steps=1)
    _, weighed = trained(reader, tmp_path, steps=1, reliance_coef=1.0)
    reliance = plain[0]["experience/reliance"]
    assert weighed[0]["experience/reliance"] == reliance > 1
    share = weighed[0]["loss/policy"] / plain[0]["loss/policy"]
    assert np.exp(-reliance) * 0.999 <= share < np.exp(-reliance / 2)


@pytest.mark.parametrize(("lr", "acts"), [(5e-4, True), (1e-6, False)])
def test_a_boost_frees_tokens_where_updates_of_one_step_move_them_far(reader, tmp_path, lr, acts):
    """Rare tokens that several updates of a step raise; with small steps no clip binds."""
    _, results = trained(reader, tmp_path, steps=6, count=8, minibatches=8, lr=lr, boost=0.6)
    freed = [found["boost/freed_fraction"] for found in results]
    assert np.mean(freed) >= 0.05 if acts else max(freed) == 0
