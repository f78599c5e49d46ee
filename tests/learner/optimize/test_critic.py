"""The critic: where values are read, what they are trained towards, what they do to the policy."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_groups import NEVER, WEIGHTS, crossed, data, ppo, same, sequence, tensors, tiny
from episodes import episode
from hypothesis import given
from hypothesis import strategies as st
from serial_recipe import RECIPE
from serial_runs import Finished, trainer
from slow_gae import slow_gae
from updates import FORKS, groups, updater

from evolver_async.config import AdvantageConfig, Config
from evolver_async.config.load import stage_config
from evolver_async.model import lora, policy
from evolver_async.schema import Group, Role, TurnFlag
from learner.advantage.assign import Advantages, assign
from learner.advantage.gae import whitened
from learner.advantage.shaped_rewards import rewards_of
from learner.data.batch import Batch, LogProbs, Values
from learner.data.collate import Lag, collate
from learner.diagnostics.measure import fit_metrics
from learner.loss.terms import value_loss
from learner.optimize import step_passes
from learner.optimize.critic import Critic
from learner.ranks.mesh import alone
from learner.state import LearnerState
from learner.step import Updater

__all__ = ["tiny"]  # the fixture

KINDS = ["shared", "separate"]


def new_critic(model: torch.nn.Module, kind: str) -> Critic:
    trunk = lora.twin(policy.split_model(model)[0]) if kind == "separate" else None
    return Critic(model, trunk, alone("cpu"), betas=(0.9, 0.99), eps=1e-8)


def made(tiny: Path, kind: str, seed: int = 0) -> tuple[torch.nn.Module, Critic]:
    """A policy, and a critic that says something."""
    model = policy.load_model(tiny, dtype="float32", device="cpu")
    critic = new_critic(model, kind)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in critic.module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model, critic


def batch_of(*given_: Group) -> Batch:
    return collate(list(given_), {WEIGHTS: Lag(0)}, NEVER)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_read_where_a_token_is_predicted_and_behind_the_last(tiny, kind):
    model, critic = made(tiny, kind)
    batch = batch_of(crossed())
    values = critic.score(model, batch, 24, alone("cpu"))
    trunk = critic.module["trunk"] if kind == "separate" else policy.split_model(model)[0]
    head, expected, ends = critic.module["head"], [], []
    for one in [s for t in crossed().trajectories for s in t.sequences]:
        tokens_1T = torch.from_numpy(one.tokens).long()[None]
        with torch.no_grad():
            hidden_TD = trunk(input_ids=tokens_1T, use_cache=False).last_hidden_state[0]
            values_T = (hidden_TD @ head.weight + head.bias).tolist()
        expected += [values_T[t - 1] for t in range(len(one)) if one.roles[t] == Role.ACTION]
        ends.append(values_T[-1])
    np.testing.assert_allclose(values.value_N, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(values.end_value_R, ends, rtol=1e-4, atol=1e-4)


def test_a_new_critic_expects_nothing(tiny):
    model = policy.load_model(tiny, dtype="float32", device="cpu")
    for kind in KINDS:
        batch = batch_of(crossed())
        values = new_critic(model, kind).score(model, batch, 24, alone("cpu"))
        assert not values.value_N.any() and not values.end_value_R.any()


def assigned(
    batch: Batch, values: Values, settings: AdvantageConfig, anchor_N: np.ndarray
) -> Advantages:
    logprobs = LogProbs(anchor_N, batch.mu_N, np.zeros_like(batch.mu_N))
    rewards = rewards_of(batch, logprobs, Config().loss, settings)
    return assign(
        batch, logprobs, values, rewards, settings, scale=1.0, baseline=0.0, step=0, steps=1
    )


@pytest.mark.parametrize("bootstrap", [True, False])
def test_credit_follows_the_order_of_writing_across_contexts(bootstrap):
    batch = batch_of(crossed())
    values = Values(
        np.arange(1, 10, dtype=np.float32) / 8, np.array([100.0, 3.0, 200.0], np.float32)
    )
    settings = AdvantageConfig(kind="gae", gamma=0.9, lam=0.5, whiten=False, bootstrap=bootstrap)
    found = assigned(batch, values, settings, np.zeros_like(batch.mu_N))
    assert found.finite_P.all()
    # rows: turns 0 0 2 | 1 3 3; in time: rows' places 0 1 3 2 4 5
    V = values.value_N.astype(float)
    after = 3.0 if bootstrap else 0.0
    times = [0, 1, 3, 2, 4, 5]
    first = slow_gae([0, 0.5, -1, 2, 0, 4], V[times].tolist(), after, 0.9, 0.5)
    second = slow_gae([0.5, 0, -0.25 - 0.5], V[6:].tolist(), 0.0, 0.9, 0.5)
    np.testing.assert_allclose(found.advantage_N[times], first, rtol=1e-5)
    np.testing.assert_allclose(found.advantage_N[6:], second, rtol=1e-5)
    np.testing.assert_allclose(found.return_N, found.advantage_N + values.value_N, rtol=1e-5)
    spread = np.var(found.return_N.astype(float))
    lost = np.var(found.return_N.astype(float) - V)
    explained = fit_metrics(values.value_N, found.return_N)["critic/explained"]
    assert explained == pytest.approx(1 - lost / spread, rel=1e-4)


@pytest.mark.parametrize("kind", ["gae", "gae_bilevel", "vtrace"])
def test_a_group_without_finite_values_trains_nobody_and_spoils_nobody(kind):
    settings = AdvantageConfig(kind=kind)
    found = []
    for batch in (batch_of(crossed()), batch_of(crossed(), crossed())):
        value_N = np.tile(np.arange(9, dtype=np.float32) / 8, len(batch.mu_N) // 9)
        value_N[9:10] = np.nan
        values = Values(value_N, np.zeros(len(batch.trajectory_R), np.float32))
        found.append(assigned(batch, values, settings, np.zeros_like(batch.mu_N)))
    good, bad = found
    assert bad.finite_P.tolist() == [True, True, False, False] and bad.left_out == {1}
    assert bad.advantage_N[:9].tolist() == good.advantage_N.tolist()  # whitening saw no other
    assert np.abs(whitened(good.advantage_N.astype(float)) - good.advantage_N).max() < 1e-4
    assert not bad.advantage_N[9:].any()


def test_vtrace_reads_the_weight_of_the_policy_that_is_trained():
    batch = batch_of(crossed())
    anchor_N = batch.mu_N + np.log(np.float32(0.5))
    values = Values(np.zeros_like(batch.mu_N), np.zeros(len(batch.trajectory_R), np.float32))
    settings = AdvantageConfig(kind="vtrace", whiten=False, bootstrap=False)
    found = assigned(batch, values, settings, anchor_N)
    # V = 0 and ρ = c = ½: vs_t = Σ_{j>=t} ½^{j-t+1} r_j, A_t = ½ (r_t + vs_{t+1})
    np.testing.assert_allclose(found.return_N[6:], [0.25 - 0.75 / 8, -0.75 / 4, -0.75 / 2])
    np.testing.assert_allclose(found.advantage_N[6:], [0.25 - 0.75 / 8, -0.75 / 4, -0.75 / 2])


value = st.floats(-3, 3, width=32)


@given(st.lists(st.tuples(value, value, value), min_size=1, max_size=8), st.floats(0.01, 2))
def test_the_value_loss_matches_the_loop_and_adds_up(rows, clip):
    V, old, G = torch.tensor(rows, dtype=torch.float64).T
    loss, held = value_loss(V, old, G, clip=clip, tokens=len(rows))
    expected = 0.0
    for v, o, g in rows:
        clipped = o + max(-clip, min(clip, v - o))
        expected += 0.5 * max((v - g) ** 2, (clipped - g) ** 2) / len(rows)
    assert float(loss) == pytest.approx(expected, abs=1e-9)
    parts = [
        value_loss(V[cut], old[cut], G[cut], clip=clip, tokens=len(rows))[0]
        for cut in (slice(0, 3), slice(3, None))
    ]
    assert float(sum(parts)) == pytest.approx(expected, abs=1e-9)
    V.requires_grad_()
    grad = torch.autograd.grad(
        value_loss(V, old, G, clip=clip, tokens=len(rows))[0], V, allow_unused=True
    )[0]
    assert not grad[held].any()  # who is held is not moved


def test_a_value_is_held_only_on_its_way_beyond_the_clip():
    def held(v: float, goal: float) -> bool:
        row = (torch.tensor([x]) for x in (v, 0.0, goal))
        return bool(value_loss(*row, clip=0.2, tokens=1)[1])

    assert held(0.3, 1.0)  # has come far enough towards its goal
    assert not held(0.1, 1.0) and not held(0.3, -1.0)  # not yet; must come back


def test_fit_is_0_for_a_constant_and_1_for_the_truth():
    goal = np.array([0.0, 1.0, 3.0])
    assert fit_metrics(np.full(3, 7.0), goal)["critic/explained"] == pytest.approx(0)
    assert fit_metrics(goal, goal)["critic/explained"] == 1
    assert "critic/explained" not in fit_metrics(goal, np.ones(3))


# ---- inside of a step


def take(made_: Updater, state: LearnerState, seed: int = 0) -> dict[str, float]:
    outcome = made_.step("rl", stage_config(made_.config, 0), data(seed), state, FORKS, 9)
    state.take += 1
    assert outcome.updates == made_.config.learner.minibatches
    return outcome.metrics


@pytest.mark.parametrize("kind", KINDS)
def test_while_the_critic_warms_up_the_policy_stays(tiny, tmp_path, kind):
    made_, state = updater(ppo(tiny, kind, warmup=2), tmp_path), LearnerState(lineage=1)
    before = tensors(made_.model)
    losses = []
    for step in range(2):
        metrics = take(made_, state)
        losses.append(metrics["loss/value"])
        assert metrics["loss/grad_norm"] == 0 and metrics["critic/grad_norm"] > 0
        assert state.critic_steps == step + 1 and same(before, tensors(made_.model))
    assert losses[1] < losses[0]
    assert made_.critic is not None and tensors(made_.critic.module)["head.weight"].any()
    assert take(made_, state)["loss/grad_norm"] > 0
    assert not same(before, tensors(made_.model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_kl_bounds_the_policy_and_not_the_critic_that_warms_up(tiny, tmp_path, kind):
    settings = ppo(tiny, kind, warmup=1)
    settings.loss.target_kl = 1e-9
    made_, state = updater(settings, tmp_path), LearnerState(lineage=1)
    assert take(made_, state)["learner/updates"] == settings.learner.minibatches == 2
    outcome = made_.step("rl", stage_config(settings, 0), data(), state, FORKS, 9)
    assert outcome.updates == 0 and outcome.filtered.keys() == {"target_kl"}
    assert made_.critic is not None
    moved = (made_.optimizer, made_.critic.optimizer)
    left = [p.grad for one in moved for group in one.param_groups for p in group["params"]]
    assert left and all(grad is None for grad in left)


def test_the_last_update_is_checked_within_the_measured_budget(tiny, tmp_path, monkeypatch):
    """The probe of a budget needs gradients, the check of an update has none."""

    def probed(probe, moved, ranks, most) -> int:
        probe(most)
        return 4096

    monkeypatch.setattr(step_passes, "measured", probed)
    settings = ppo(tiny, "separate")
    settings.learner.token_budget, settings.loss.target_kl = 0, 1e6
    made_, state = updater(settings, tmp_path), LearnerState(lineage=1)
    assert take(made_, state)["learner/updates"] == settings.learner.minibatches


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_learns_what_a_context_is_worth(tiny, tmp_path, kind):
    made_, state = updater(ppo(tiny, kind, lr=3e-2, clip=1.0), tmp_path), LearnerState(lineage=1)
    found = []
    for number in range(4):  # the task is all that the outcome depends on
        (group,) = groups(1)
        group.group_id = number
        for member in range(2):
            text = sequence("PPAA", [0, 0], 10 * number + member)
            text.tokens[:2] = 20 + number % 2
            reward = float(number % 2)
            one = episode(text, member=member, reward=reward, turn_rewards=np.array([reward], "f4"))
            group.trajectories[member:] = [one]
        found.append(group)
    explained = []
    for _ in range(30):
        outcome = made_.step("rl", stage_config(made_.config, 0), found, state, FORKS, 99)
        explained.append(outcome.metrics["critic/explained"])
    assert explained[0] == pytest.approx(0) and explained[-1] > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_loss_moves_the_policy_only_where_it_is_shared(tiny, tmp_path, kind):
    found = []
    for coef in (0.1, 0.9):
        made_ = updater(ppo(tiny, kind, coef=coef), tmp_path)
        take(made_, LearnerState(lineage=1))  # of two updates: in the first the head is still 0
        found.append(tensors(made_.model))
    assert same(*found) == (kind == "separate")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_a_critic_goes_on_bitwise(tiny, tmp_path, kind):
    made_, state = updater(ppo(tiny, kind), tmp_path), LearnerState(lineage=1)
    take(made_, state)
    (tmp_path / "c").mkdir()
    made_.save(tmp_path / "c", state)
    again = updater(ppo(tiny, kind), tmp_path)
    state_again = again.restore(tmp_path / "c")
    assert state_again == state and state.critic_steps == 1
    assert take(made_, state, seed=1) == take(again, state_again, seed=1)
    assert made_.critic is not None and again.critic is not None
    assert same(tensors(made_.model), tensors(again.model))
    assert same(tensors(made_.critic.module), tensors(again.critic.module))


@pytest.mark.parametrize("spoilt", ["critic", "policy"])
def test_a_gradient_that_is_not_finite_moves_neither(tiny, tmp_path, monkeypatch, spoilt):
    made_, state = updater(ppo(tiny, "separate", minibatches=1), tmp_path), LearnerState(lineage=1)
    take(made_, state)
    assert made_.critic is not None
    module = made_.critic.module if spoilt == "critic" else made_.model
    before = tensors(made_.model), tensors(made_.critic.module)
    handle = next(module.parameters()).register_hook(lambda grad: grad * np.nan)
    outcome = made_.step("rl", stage_config(made_.config, 0), data(), state, FORKS, 9)
    handle.remove()
    assert outcome.updates == 0 and state.bad_steps == 1 and state.critic_steps == 1
    assert same(before[0], tensors(made_.model))
    assert same(before[1], tensors(made_.critic.module))


def test_a_separate_critic_begins_as_the_policy_of_its_first_step(tiny, tmp_path):
    made_ = updater(ppo(tiny, "separate", minibatches=1), tmp_path)
    with torch.no_grad():
        for parameter in made_.model.parameters():
            parameter.mul_(1.5)
    decoder = tensors(policy.split_model(made_.model)[0])
    made_.critic = made_._make_critic()
    assert same(decoder, tensors(made_.critic.module["trunk"]))
    state = LearnerState(lineage=1)
    take(made_, state)  # the head is 0, so that nothing reaches the trunk
    assert same(decoder, tensors(made_.critic.module["trunk"]))
    take(made_, state)
    assert not same(decoder, tensors(made_.critic.module["trunk"]))


def test_a_fresh_optimizer_is_the_critics_too(tiny, tmp_path):
    settings = ppo(tiny, "shared")
    settings.stages = [settings.stages[0], dataclasses.replace(settings.stages[0])]
    settings.stages[1].reset_optimizer = True
    made_ = updater(settings, tmp_path)
    take(made_, LearnerState(lineage=1))
    assert made_.critic is not None and made_.critic.optimizer.state
    made_.begin_stage(stage_config(settings, 1), 1)
    assert not made_.critic.optimizer.state and not made_.optimizer.state


# ---- whole runs


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("critic_serial"), RECIPE)


@pytest.mark.process
@pytest.mark.parametrize(
    "changes",
    [
        ("advantage.kind=gae", "correction.kind=ppo"),
        ("advantage.kind=vtrace", "correction.kind=none", "critic.kind=separate"),
    ],
    ids=["ppo", "vtrace"],
)
def test_a_critic_learns_the_bandit_from_stale_data(train, request, changes):
    run = train(request.node.callspec.id, *changes, "critic.lr=1e-2", "actors.weight_lag=1")
    success = run.rl("train/success")
    assert success[0] < 0.8 and sum(success[-5:]) / 5 >= 0.9
    assert [row for row in run.rows if "eval/success" in row][-1]["eval/success"] >= 0.9
    assert min(run.rl("staleness/max")[2:]) >= 1
    first, last = run.rl("critic/value")[0], run.rl("critic/value")[-1]
    assert first == 0 and last == pytest.approx(run.rl("critic/return")[-1], abs=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_episode_trains_neither_the_policy_nor_its_critic(
    kind: str, tiny: Path, tmp_path: Path
) -> None:
    """As a step on the others alone: with a critic no member counts in another's baseline."""
    given_, others = data(), data()
    for group, kept in zip(given_, others, strict=True):
        group.trajectories[0].turn_flags[-1] = TurnFlag.CUT
        kept.trajectories = kept.trajectories[1:]
    steps = []
    for groups_, masks in ((given_, True), (others, False)):
        settings = ppo(tiny, kind)
        settings.advantage.whiten = False
        settings.loss.mask_truncated = masks
        made_ = updater(settings, tmp_path)
        result = made_.step(
            "rl", stage_config(settings, 0), groups_, LearnerState(lineage=1), FORKS, 9
        )
        assert made_.critic is not None
        steps.append((result, tensors(made_.model), tensors(made_.critic.module)))
    (masked, policy_, critic), (slow, its_policy, its_critic) = steps
    assert masked.metrics["train/masked_truncated"] == 0.5
    assert masked.tokens == slow.tokens and masked.updates == slow.updates == 2
    for ours, theirs in ((policy_, its_policy), (critic, its_critic)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.allclose(ours[name], tensor, atol=1e-5), name
