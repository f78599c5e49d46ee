"""Values and combinations of keys that cannot work, each refused by its key."""

from pathlib import Path

import pytest
from refusals import refusal

from evolver_async.config import SelectionConfig
from evolver_async.config.load import load, stage_config
from learner.data.selection import spread


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learner.lr=nan"], "learner.lr: must be finite, is nan"),
        (["learner.lr=-1"], "learner.lr: must be at least 0"),
        (["engine.in_flight=drop"], "engine.in_flight: must be one of keep, keep_kv, wait"),
        (["engine.eager=true"], "engine.eager: must be one of auto, always, never"),
        (["learner.lr=inf"], "learner.lr: must be finite"),
        # a weight without any gradient, as of a token that is never read, would become 0 / 0
        (["learner.eps=0"], "learner.eps: must be greater than 0"),
        (["learner.grad_clip=0"], "learner.grad_clip: must be greater than 0"),
        (["actors.count=0"], "actors.count: must be at least 1"),
        (["checkpoint.keep=1"], "checkpoint.keep: must be at least 2"),
        (["rollout.temperature=0"], "rollout.temperature: must be greater than 0"),
        (["rollout.temperature=2.1", "engine.kind=vllm"], "rollout.temperature: must be at least "),
        (["eval.temperature=3", "engine.kind=vllm"], "eval.temperature: must be at least "),
        (["eval.sets.a.temperature=3", "engine.kind=vllm"], "eval.sets.a.temperature: must be "),
        (
            ["questioning={kind: goals, temperature: 2.1}", "engine.kind=vllm"],
            "questioning.temperature: must be at least ",
        ),
        (["buffer.max_ready=0.5"], "buffer.max_ready: must be 0 or at least 1, is 0.5"),
        (["actors.weight_lag=5"], "actors.weight_lag: must be at most buffer.max_staleness"),
        (["actors.weight_lag=1", "actors.weight_lag_low=2"], "actors.weight_lag_low: "),
        (["rollout.group_size=1"], "rollout.group_size: must be at least 2: advantage.kind=grpo"),
        (["rollout.group_size=1", "advantage.kind=rloo"], "rollout.group_size: "),
        (
            ["rollout.group_size=1", "advantage.kind=adca", "judge.kind=rule"],
            "rollout.group_size: ",
        ),
        (
            [
                "stages=[{kind: rl, tokens: 9}]",
                "learner.decay=none",
                "judge.kind=rule",
                "advantage={kind: adca, alpha_final: 0}",
            ],
            "stages[0].steps: must be set: advantage.alpha_final",
        ),
        (
            ["experience.kind=contrast", "rollout={guided: adaptive, guided_fraction: 1}"],
            "rollout.guided_fraction: must leave members unguided: rollout.guided=adaptive",
        ),
        (["rollout.guided=often"], "rollout.guided: must be one of fixed, failed, adaptive"),
        (
            ["advantage={kind: gae, gamma: 1.1}"],
            "advantage.gamma: must be at least 0 and at most 1",
        ),
        (["critic.kind=none"], "critic.kind: must be one of shared, separate"),
        (["critic.lr=0"], "critic.lr: must be greater than 0"),
        (["loss.dpo_beta=0"], "loss.dpo_beta: must be greater than 0"),
        (["loss.target_kl=0"], "loss.target_kl: must be greater than 0"),
        (["metrics.tags=[1, {a: b}]"], "metrics.tags"),
        (
            ["correction={kind: icepop, low: 1.5}"],
            "correction.low: must be at least 0 and at most 1, or -1, is 1.5",
        ),
        (["correction={kind: icepop, high: 0.9}"], "correction.high: must be at least 1"),
        (
            ["correction.low=-0.5"],
            "correction.low: must be at least 0 and at most 1, or -1, is -0.5",
        ),
        (["correction.w_max=0"], "correction.w_max: must be greater than 0"),
        (["correction.w_max=-2"], "correction.w_max: must be greater than 0"),
        (["loss.clip_low=-0.2"], "loss.clip_low: must be greater than 0"),
        (["loss.clip_low=1"], "loss.clip_low: must be greater than 0 and less than 1"),
        (["loss.clip_high=-1.5"], "loss.clip_high: must be greater than 0"),
        (["loss.boost=-1"], "loss.boost: must be at least 0"),
        (["selection={kind: top_p, p: 1.1}"], "selection.p: must be greater than 0 and at most 1"),
        (["selection={kind: resample_on_correct, members: 3}"], "selection.members: must be 0 or"),
        (["stages=[]"], "stages: needs at least one stage"),
        (
            ["stages=[{until_success: 0.9}]", "learner.decay=none", "eval.every=0"],
            "stages[0].until_success: needs evaluations",
        ),
        (["loss={kl: k1, kl_coef: 0.1}"], "loss.kl: k1 has no gradient"),
        (["stages=[{kind: rl}]"], "stages[0]: has no limit"),
        (["stages=[{kind: rl, hours: 1}]"], "stages[0].steps: must be set: learner.decay=linear"),
        (["stages=[{kind: ppo, steps: 1}]"], "stages[0].kind: must be one of sft, world_model,"),
        (["stages=[{kind: reflect, steps: 1, alternatives: 0}]"], "stages[0].alternatives: "),
        (["stages=[{kind: world_model, steps: 1}]", "buffer.demo_groups=8"], "buffer.demo_groups"),
        (["stages=[{kind: dpo, steps: 1}]", "rollout.group_size=1"], "rollout.group_size: "),
        (["tasks.path=x", "tasks.train=3"], "tasks.train: "),
        (["tasks.path=x", "tasks.mixture=[{env: bandit}]"], "tasks.mixture: "),
        (["tasks.mixture=[{weight: 1}]"], "tasks.mixture[0].env: must name an environment"),
        (["tasks.mixture=[{env: bandit, weight: 0}]"], "tasks.mixture[0].weight: "),
        (["tasks.mixture=[{env: bandit, params: {a: .nan}}]"], "tasks.mixture[0].params.a: "),
        (["tasks.mixture=[{env: bandit, wait: 2}]"], "tasks.mixture[0].wait"),
        (["stages.0.kind=sft", "buffer.demo_groups=8"], "buffer.demo_groups: "),
        (
            ["stages=[{kind: sft, until_success: 0.5}]", "learner.decay=none"],
            "stages[0].until_success: a stage of kind sft is evaluated only after its end",
        ),
        (["rollout.max_turns=32768"], "rollout.max_turns: must be at least 1 and at most 32767"),
        (
            ["questioning.max_turns=32768"],
            "questioning.max_turns: must be at least 1 and at most 32767",
        ),
        (
            [
                "experience={kind: contrast, internalise: distill}",
                "rollout.guided_fraction=0.5",
                "stages=[{kind: sft, steps: 1}]",
            ],
            "experience.internalise: must be none or strip: distill belongs to rl stages",
        ),
        (
            [
                "experience={kind: contrast, internalise: distill}",
                "rollout={group_size: 4, guided_fraction: 0.25}",
                "stages=[{kind: rl, steps: 1}]",
            ],
            "rollout.guided_fraction: leaves one of 4 members alone: distill compares",
        ),
        (
            ["experience.kind=contrast", "stages=[{kind: sft, steps: 1}]"],
            "experience.internalise: must be none, or rollout.guided_fraction 0",
        ),
        (["policy.hidden_size=60"], "policy.hidden_size: "),
        (["rollout.max_tokens=1024"], "rollout.max_tokens: "),
        (["learner.token_budget=100"], "learner.token_budget: "),
        (["learner.betas=[0.9]"], "learner.betas: "),
        (["buffer.address=tcp://0.0.0.0:5555"], "buffer.address: 0.0.0.0 is not a loopback"),
        (
            ["launch.kind=serial", "buffer.address=tcp://127.0.0.1:4000"],
            "buffer.address: launch.kind=serial is one process: must be empty",
        ),
        (["launch.kind=serial", "experience.address=ipc:///s/e"], "experience.address: launch"),
        (["launch.kind=serial", "security.keys=k"], "security.keys: launch.kind=serial is one"),
        (["buffer.address=udp://127.0.0.1:1"], "buffer.address: must be ipc://"),
        (["run.name=a/b"], "run.name: "),
        (["engine.device=tpu"], "engine.device: "),
        (["env.params.x=.nan"], "env.params.x: must be finite"),
        (["env.params={x: [18446744073709551616]}"], "env.params.x[0]: must be in -2**63..2**64"),
        (["env.params={x: {1.5: 2}}"], "env.params.x: key 1.5: must be text or an integer"),
        (["env.params={x: {true: 2}}"], "env.params.x: key True: must be text or an integer"),
        (["env.params={x: !!binary aGk=}"], "env.params.x: bytes has no place here"),
        (["judge.params={x: .nan}"], "judge.params.x: must be finite"),
        (["run.seed=18446744073709551616"], "run.seed: must be in -2**63..2**64 - 1"),
    ],
)
def test_impossible_values_and_combinations_are_named(arguments: list[str], message: str) -> None:
    assert refusal(*arguments).startswith(message)


def test_vtrace_runs_on_a_recipe_that_interpolates() -> None:
    recipe = Path(__file__).parents[4] / "configs" / "starpo_s.yaml"
    config = load(recipe, ["advantage.kind=vtrace", "correction.kind=none"])
    assert (config.correction.kind, config.correction.anchor) == ("none", "interpolate")


@pytest.mark.parametrize(("groups", "keep"), [(2, 0.25), (3, 0.5), (5, 0.5), (7, 0.5)])
def test_a_step_has_at_most_as_many_updates_as_selection_leaves_groups(
    groups: int, keep: float
) -> None:
    selection = SelectionConfig(kind="spread", keep=keep)
    kept = len(spread([], [1.0] * groups, selection))
    step = [
        "stages=[{steps: 10}]",
        f"selection={{kind: spread, keep: {keep}}}",
        f"learner.groups_per_step={groups}",
    ]
    for given in (kept, kept + 1):
        config = load(None, [*step, f"learner.minibatches={given}"])
        assert config.learner.minibatches == given, "as written"
        assert stage_config(config, 0).learner.minibatches == kept


@pytest.mark.parametrize("kind", ["sft", "world_model", "reflect", "dpo"])
def test_a_stage_without_selection_makes_as_many_updates_as_it_has_groups(kind: str) -> None:
    arguments = [
        f"stages=[{{kind: {kind}, steps: 10}}]",
        "selection={kind: spread, keep: 0.25}",
        "learner={groups_per_step: 8, minibatches: 8}",
    ]
    for given in (8, 9):
        config = load(None, [*arguments, f"learner.minibatches={given}"])
        assert stage_config(config, 0).learner.minibatches == 8


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "stages=[{kind: rl, steps: 1}]",
            "experience.kind=contrast",
            "rollout={guided: failed, guided_fraction: 1}",
        ],
        ["stages=[{kind: sft, steps: 1}]", "rollout.guided=failed"],
    ],
)
def test_a_rule_about_guidance_holds_where_it_can_act(arguments: list[str]) -> None:
    assert load(None, arguments).rollout.guided == "failed"


def test_a_supervised_stage_can_change_what_it_reads() -> None:
    changes = "safety: {max_reward: 9}, buffer: {reuse: 2}, rollout: {guided_fraction: 0}"
    config = load(None, [f"stages=[{{kind: sft, steps: 1, override: {{{changes}}}}}]"])
    assert stage_config(config, 0).safety.max_reward == 9


def test_a_dpo_stage_can_change_what_it_reads() -> None:
    changes = "loss: {dpo_beta: 0.2, dpo_nll_coef: 1, entropy_top_k: 4}, selection: {max_empty: 9}"
    config = load(None, [f"stages=[{{kind: dpo, steps: 1, override: {{{changes}}}}}]"])
    assert stage_config(config, 0).selection.max_empty == 9


@pytest.mark.parametrize(
    ("arguments", "override"),
    [
        (["experience.kind=contrast", "loss.boost=0.6"], "rollout: {guided_fraction: 0}"),
        (["advantage.kind=grpo_process"], "rollout: {max_turns: 1}"),
        (["advantage={kind: 'own:f', params: {x: 1}}"], "advantage: {kind: rloo}"),
        (["advantage={kind: gae_bilevel, bootstrap: true}", "rollout.max_turns=1"], ""),
    ],
)
def test_what_acts_in_one_stage_is_allowed(arguments: list[str], override: str) -> None:
    later = f"{{kind: rl, steps: 1, override: {{{override}}}}}"
    loaded = load(None, [*arguments, f"stages=[{{kind: rl, steps: 1}}, {later}]"])
    assert len(loaded.stages) == 2


@pytest.mark.parametrize(
    ("arguments", "override"),
    [(["advantage.params={x: 1}"], ""), ([], "override: {advantage: {params: {x: 1}}}")],
)
def test_what_acts_after_a_rollback_is_allowed(arguments: list[str], override: str) -> None:
    safety = "safety={action: rollback, rollback: {advantage: {kind: 'own:f'}}}"
    loaded = load(None, [f"stages=[{{kind: rl, steps: 1, {override}}}]", *arguments, safety])
    assert stage_config(loaded, 0, rollbacks=1).advantage.params == {"x": 1}
