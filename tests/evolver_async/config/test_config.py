"""Configuration: what a recipe may say, and that every mistake is named by its key."""

import math
from pathlib import Path

import pytest

from evolver_async.config import Config, Selection, Stage
from evolver_async.config.check import check, check_paths
from evolver_async.config.load import (
    ConfigError,
    dump,
    from_dict,
    load,
    stage_config,
    to_dict,
)
from evolver_async.config.reference import BEGIN, END, reference, rewrite
from evolver_async.config.values import AT_LEAST, CHOICES, FRACTIONS, POSITIVE
from learner.data.selection import kept_groups

STEPS = "stages.0.steps=10"


def refusal(*dotlist: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, [STEPS, *dotlist])
    return str(caught.value)


def test_arguments_win_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learner: {lr: 1e-3, minibatches: 2}\nstages: [{kind: rl, steps: 7}]\n")
    config = load(recipe, ["learner.lr=2e-3", "env.params.size=4"])
    assert config.learner.lr == 2e-3
    assert config.learner.minibatches == 2
    assert config.learner.grad_clip == Config().learner.grad_clip
    assert config.env.params == {"size": 4}
    assert config.stages == [Stage(kind="rl", steps=7)]


def test_another_environment_drops_the_parameters_of_the_one_below(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text(
        "env: {name: first, params: {size: 4, grid: words}}\nstages: [{steps: 1}]\n"
    )
    top, same = tmp_path / "top.yaml", tmp_path / "same.yaml"
    top.write_text("base: low.yaml\nenv: {name: second, params: {limit: 9}}\n")
    same.write_text("base: low.yaml\nenv: {name: first, params: {limit: 9}}\n")
    assert load(top).env.params == {"limit": 9}
    assert load(same).env.params == {"size": 4, "grid": "words", "limit": 9}
    assert load(same, ["env.name=first"]).env.params == load(same).env.params
    assert load(same, ["env.name=third"]).env.params == {}
    assert load(same, ["env={name: third, params: {a: 1}}"]).env.params == {"a": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ["env.name=second", "env.params={limit: 20}", "env.params.low=1"],
        ["env.params.low=1", "env.name=second", "env.params={limit: 20}"],
        ["env[params]={limit: 20, low: 1}", "env={name: second}"],
        ["env={params: {limit: 20}}", "env={name: second, params: {low: 0}}", "env.params.low=1"],
    ],
)
def test_parameters_are_those_of_the_environment_named_in_whatever_order(
    tmp_path: Path, arguments: list[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {name: first, params: {size: 4}}\nstages: [{steps: 1}]\n")
    config = load(recipe, arguments)
    assert (config.env.name, config.env.params) == ("second", {"limit": 20, "low": 1})


def test_a_stage_with_another_environment_has_parameters_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "env: {name: first, params: {size: 4, grid: words}}\n"
        "stages: [{steps: 1, override: {env: {name: second, params: {limit: 9}}}},"
        " {steps: 1, override: {env: {params: {size: 6}}}}]\n"
    )

    def params(*more: str) -> list[dict[str, object]]:
        config = load(recipe, more)
        return [stage_config(config, index).env.params for index in range(2)]

    assert params() == [{"limit": 9}, {"size": 6, "grid": "words"}]
    third = ["stages.0.override.env.params.low=1", "stages.0.override.env.name=third"]
    assert params(*third)[0] == {"low": 1}
    assert params("stages.0.override.env.name=second")[0] == {"limit": 9}
    assert params("stages.1.override={env: {name: third}}")[1] == {}
    assert params("env={name: third, params: {limit: 20}}")[1] == {"limit": 20}
    late = ["stages.1.override={env: {params: {low: 1}}}", "stages.1.override.env.name=third"]
    assert params(*late)[1] == {"low": 1}


def test_what_is_no_environment_in_a_stage_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("stages: [{steps: 1, override: {env: ice}}]\n")
    with pytest.raises(ConfigError, match=r"^stages\[0\]\.override: env: must be a mapping"):
        load(tmp_path / "recipe.yaml", ["env.name=other"])


def test_the_last_of_several_arguments_wins() -> None:
    config = load(None, [STEPS, "env.params.size=9", "env={name: other, params: {size: 5}}"])
    assert config.env.params == {"size": 5}


def test_an_argument_about_a_stage_leaves_references_in_it(monkeypatch) -> None:
    monkeypatch.setenv("SERVER", "http://here")
    stages = "stages=[{steps: 1, override: {env: {params: {url: '${oc.env:SERVER}'}}}}]"
    config = load(None, [stages, "stages.0.steps=3"])
    assert config.stages[0].steps == 3
    assert config.stages[0].override["env"]["params"]["url"] == "${oc.env:SERVER}"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("learner.lrr=3", "learner.lrr: unknown key, did you mean learner.lr?"),
        ("learnr.lr=3", "learnr: unknown key, did you mean learner?"),
        ("env.latency.medan_s=3", "env.latency.medan_s: unknown key"),
        ("stages.0.stps=4", "stages[0].stps: unknown key, did you mean stages[0].steps?"),
        ("learner.lr=fast", "learner.lr: "),
        ("learner.minibatches=1.5", "learner.minibatches: "),
        ("learner=3", "learner: must be a mapping"),
        ("stages.0.steps=x", "stages[0].steps: "),
        ("stages.4.steps=3", "stages.4.steps: there is no stage 4"),
        ("stages=[3]", "stages[0]: must be a mapping"),
        ("stages+={stps: 4}", "stages+.stps: unknown key, did you mean stages+.steps?"),
        ("stages+=3", "stages+: must be a mapping"),
        ("stages+={kind: rl}", "stages[1]: has no limit"),
        ("learner.betas=[a,b]", "learner.betas[0]: "),
        ("learner.lr=[1", "learner.lr: cannot read"),
        ("lr", "'lr': arguments are written section.key=value"),
    ],
)
def test_unknown_keys_and_wrong_types_are_named(argument: str, message: str) -> None:
    assert refusal(argument).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learner.lr=nan"], "learner.lr: is not a number"),
        (["learner.lr=-1"], "learner.lr: must not be negative"),
        (["learner.lr=inf"], "learner.lr: must be finite"),
        (["learner.grad_clip=0"], "learner.grad_clip: must be greater than 0"),
        (["actors.count=0"], "actors.count: must be at least 1"),
        (["checkpoint.keep=1"], "checkpoint.keep: must be at least 2"),
        (["rollout.temperature=0"], "rollout.temperature: must be greater than 0"),
        (["buffer.reuse=6"], "buffer.reuse: must be at most buffer.max_staleness + 1"),
        (["buffer.max_staleness=2", "actors.weight_lag=2", "buffer.reuse=2"], "buffer.reuse: "),
        (["actors.weight_lag=5"], "actors.weight_lag: must be at most buffer.max_staleness"),
        (["actors.weight_lag=1", "actors.weight_lag_low=2"], "actors.weight_lag_low: "),
        (["rollout.group_size=1"], "rollout.group_size: advantage.kind=grpo"),
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
            "stages[0].steps: advantage.alpha_final",
        ),
        (["learner.minibatches=33"], "learner.minibatches: must be at most the groups"),
        (["selection.kind=spread", "learner.minibatches=17"], "learner.minibatches: "),
        (["advantage.kind=vtrace"], "correction.kind: advantage.kind=vtrace corrects by itself"),
        (["advantage={kind: gae, gamma: 1.1}"], "advantage.gamma: must be at most 1"),
        (["critic.kind=none"], "critic.kind: must be one of shared, separate"),
        (["critic.lr=0"], "critic.lr: must be greater than 0"),
        (["loss.dpo_beta=0"], "loss.dpo_beta: must be greater than 0"),
        (["loss.kl=k1"], "loss.kl: k1 has no gradient"),
        (["tasks={train: 0, solved: 0.5, failed: 1}"], "tasks.solved: no task is met twice"),
        (["tasks={train: 0, solved: 1, failed: 0.5}"], "tasks.failed: no task is met twice"),
        (
            ["tasks.train=0", "stages=[{kind: rl, steps: 1, override: {tasks: {solved: 0}}}]"],
            "stages[0].override: tasks.solved: no task is met twice",
        ),
        (["correction={kind: gspo, level: trajectory}"], "correction.level: correction.kind=gspo"),
        (["correction={kind: icepop, low: 1.5}"], "correction.low: must be at most 1"),
        (["correction={kind: icepop, high: 0.9}"], "correction.high: must be at least 1"),
        (["correction.low=-0.5"], "correction.low: must not be negative, is -0.5"),
        (["correction.w_max=0"], "correction.w_max: must be greater than 0"),
        (["correction.w_max=-2"], "correction.w_max: must not be negative"),
        (["loss.clip_low=-0.2"], "loss.clip_low: must not be negative"),
        (["loss.clip_low=1"], "loss.clip_low: must be less than 1"),
        (["loss.clip_high=-1.5"], "loss.clip_high: must not be negative"),
        (["loss.boost=-1"], "loss.boost: must not be negative"),
        (
            ["experience.kind=contrast", "correction.kind=cispo"],
            "loss.boost: correction.kind=cispo",
        ),
        (["selection={kind: top_k, k: 2}"], "learner.minibatches: must be at most the groups"),
        (["selection={kind: top_p, p: 1.1}"], "selection.p: must be at most 1"),
        (["selection.members=4"], "selection.members: selection.kind=all keeps groups whole"),
        (["selection={kind: resample_on_correct, members: 99}"], "selection.members: must be at"),
        (["selection={kind: resample_on_correct, members: 3}"], "selection.members: must be 0 or"),
        (["advantage.overlong_limit=10"], "advantage.overlong_cache: advantage.overlong_limit and"),
        (["advantage={overlong_limit: 9, overlong_cache: 10}"], "advantage.overlong_cache: must"),
        (["stages=[]"], "stages: needs at least one stage"),
        (["stages=[{kind: rl}]"], "stages[0]: has no limit"),
        (["stages=[{kind: rl, hours: 1}]"], "stages[0].steps: learner.decay=linear"),
        (["stages=[{kind: ppo, steps: 1}]"], "stages[0].kind: must be one of sft, world_model,"),
        (["stages=[{kind: reflect, steps: 1, alternatives: 0}]"], "stages[0].alternatives: "),
        (["stages=[{kind: world_model, steps: 1}]", "buffer.demo_groups=8"], "buffer.demo_groups"),
        (["stages=[{kind: dpo, steps: 1}]", "rollout.group_size=1"], "rollout.group_size: "),
        (["tasks.path=x", "tasks.train=3"], "tasks.train: "),
        (["tasks.path=x", "tasks.mixture=[{env: bandit}]"], "tasks.mixture: "),
        (["tasks.mixture=[{weight: 1}]"], "tasks.mixture[0].env: names no environment"),
        (["tasks.mixture=[{env: bandit, weight: 0}]"], "tasks.mixture[0].weight: "),
        (["tasks.mixture=[{env: bandit, params: {a: .nan}}]"], "tasks.mixture[0].params.a: "),
        (["tasks.mixture=[{env: bandit, wait: 2}]"], "tasks.mixture[0].wait"),
        (["stages.0.until_success=0.9", "eval.every=0"], "stages[0].until_success: "),
        (["stages.0.kind=sft", "buffer.demo_groups=8"], "buffer.demo_groups: "),
        (
            ["stages=[{kind: sft, until_success: 0.5}]", "learner.decay=none"],
            "stages[0].until_success: a stage of kind sft is evaluated only after its end",
        ),
        (["stages.0.refresh_reference=true"], "stages[0].refresh_reference: "),
        (
            ["stages.0.kind=dpo", "stages.0.refresh_reference=true", "loss.kl_coef=0.1"],
            "stages[0].refresh_reference: ",
        ),
        (["rollout.max_turns=32768"], "rollout.max_turns: must be at most 32767"),
        (["questioning.max_turns=32768"], "questioning.max_turns: must be at most 32767"),
        (
            [
                "experience.kind=contrast",
                "learner.minibatches=1",
                "correction={kind: ppo, guided: anchor}",
            ],
            "loss.boost: with one update",
        ),
        (["policy.hidden_size=60"], "policy.hidden_size: "),
        (["rollout.max_tokens=1024"], "rollout.max_tokens: "),
        (["learner.token_budget=100"], "learner.token_budget: "),
        (["learner.betas=[0.9]"], "learner.betas: "),
        (["buffer.address=tcp://0.0.0.0:5555"], "buffer.address: 0.0.0.0 is not a loopback"),
        (["buffer.address=udp://127.0.0.1:1"], "buffer.address: must be ipc://"),
        (["run.name=a/b"], "run.name: "),
        (["engine.device=tpu"], "engine.device: "),
        (["env.params.x=.nan"], "env.params.x: must be finite"),
    ],
)
def test_impossible_values_and_combinations_are_named(arguments: list[str], message: str) -> None:
    assert refusal(*arguments).startswith(message)


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_lists_the_allowed_ones(name: str) -> None:
    message = refusal(f"{name}=sideways")
    assert message.startswith(f"{name}: must be one of ")
    assert all(choice in message for choice in CHOICES[name])


def test_the_tables_name_existing_keys_and_the_defaults_pass_them() -> None:
    config = Config(stages=[Stage(steps=1)])
    check(config)
    flat = to_dict(config)
    for name in [*CHOICES, *AT_LEAST, *POSITIVE, *FRACTIONS]:
        value = flat
        for part in name.split("."):
            value = value[part]


@pytest.mark.parametrize("key", ["policy.path", "weights.dir"])
def test_a_missing_directory_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: /nowhere is not a directory"):
        check_paths(load(None, [STEPS, f"{key}=/nowhere"]))


def test_a_model_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"policy\.path: .* has no tokenizer\.json"):
        check_paths(load(None, [STEPS, f"policy.path={tmp_path}"]))


def test_a_recipe_that_is_no_text_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: byte 3 is not UTF-8 text$"):
        load(recipe)
    recipe.write_bytes(b"a: \x00\x01")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not valid YAML: "):
        load(recipe)


def test_a_stage_override_holds_for_that_stage_alone() -> None:
    config = load(
        None,
        [
            "stages=[{kind: sft, steps: 3, override: {learner: {lr: 1e-2}}}, {steps: 5}]",
            "learner.lr=1e-3",
        ],
    )
    assert stage_config(config, 0).learner.lr == 1e-2
    assert stage_config(config, 1).learner.lr == 1e-3


def test_a_stage_may_have_shorter_contexts_than_the_run() -> None:
    stages = "stages=[{steps: 3, override: {policy: {max_length: 512}}}, {steps: 5}]"
    config = load(None, [stages, "policy.max_length=768"])
    assert [stage_config(config, index).policy.max_length for index in (0, 1)] == [512, 768]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "{policy: {max_length: 2048}}",
            "stages[0].override: policy.max_length: must be at most the run's (1024)",
        ),
        ("{policy: {max_length: 16}}", "stages[0].override: rollout.max_tokens: must be less"),
        ("{policy: {dtype: bfloat16}}", "stages[0].override.policy.dtype: belongs to the whole"),
        ("{learner: {lrr: 1}}", "stages[0].override: learner.lrr: unknown key"),
        ("{learner: {lr: -1}}", "stages[0].override: learner.lr: must not be negative"),
        ("{buffer: {reuse: 9}}", "stages[0].override: buffer.reuse: "),
        ("{tasks: {train: x}}", "stages[0].override: tasks.train: "),
        ("{launch: {kind: serial}}", "stages[0].override.launch: belongs to the whole run"),
    ],
)
def test_a_bad_stage_override_is_named(override: str, message: str) -> None:
    assert refusal(f"stages.0.override={override}").startswith(message)


@pytest.mark.parametrize(
    "key",
    [
        "actors.weight_lag",
        "eval.every",
        "learner.betas",
        "learner.eps",
        "learner.weight_decay",
        "learner.device",
        "learner.threads",
        "learner.max_bad_steps",
        "critic.kind",
        "buffer.lease_s",
        "buffer.stall_s",
        "buffer.warn_s",
        "buffer.segment_bytes",
        "buffer.archive",
        "buffer.address",
        "buffer.limit_bytes",
        "buffer.disk_limit_bytes",
    ],
)
def test_a_stage_cannot_override_what_the_whole_run_shares(key: str) -> None:
    section, name = key.split(".")
    default = getattr(getattr(Config(), section), name)
    override = f"{{{section}: {{{name}: {default!r}}}}}"
    said = refusal(f"stages.0.override={override}")
    assert said.startswith(f"stages[0].override.{section}")
    assert said.endswith("belongs to the whole run, not to one stage")


def test_a_stage_overrides_what_the_buffer_reads_anew_in_every_stage() -> None:
    changes = {"max_staleness": 2, "sampler": "freshest", "straggler": "wait", "demo_groups": 64}
    config = load(None, [STEPS, f"stages.0.override={{buffer: {changes}}}"])
    assert stage_config(config, 0).buffer.demo_groups == 64


@pytest.mark.parametrize("kind", ["none", "ppo", "cispo", "topr"])
def test_a_kind_that_compares_no_anchor_with_mu_ignores_interpolation(kind: str) -> None:
    """Also in one stage alone, and where guided tokens have no interpolated anchor."""
    recipe = Path(__file__).parents[3] / "configs" / "frozen_lake.yaml"
    config = load(recipe, [f"correction.kind={kind}"])
    assert [stage_config(config, i).correction.anchor for i in range(2)] == ["recompute"] * 2

    override = f"{{correction: {{kind: {kind}}}}}"
    config = load(recipe, [f"stages.1.override={override}"])
    anchors = [stage_config(config, i).correction.anchor for i in range(2)]
    assert anchors == ["interpolate", "recompute"]

    guided = ["experience.kind=contrast", "loss.boost=0", f"correction.kind={kind}"]
    config = load(None, [STEPS, *guided, "correction.anchor=interpolate"])
    assert stage_config(config, 0).correction.anchor == "recompute"


def test_vtrace_runs_on_a_recipe_that_interpolates() -> None:
    recipe = Path(__file__).parents[3] / "configs" / "starpo_s.yaml"
    load(recipe, ["advantage.kind=vtrace", "correction.kind=none"])


USUAL = ("token", 2.0, 0.5, 5.0, 0.2, 0.28)  # level, w_max, low, high, clip_low, clip_high


def bounds(config: Config, stage: int = 0) -> tuple[str | float, ...]:
    """What the learner is given in a stage."""
    staged = stage_config(config, stage)
    correction, loss = staged.correction, staged.loss
    bounds = (correction.w_max, correction.low, correction.high, loss.clip_low, loss.clip_high)
    return (correction.level, *bounds)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        *((f"{{kind: {kind}}}", USUAL) for kind in ("none", "ppo", "decoupled", "icepop", "cispo")),
        ("{kind: decoupled, level: trajectory}", ("trajectory", 5.0, 0.5, 5.0, 0.2, 0.28)),
        ("{kind: geo_mask}", ("token", 2.0, 0.8, 1.25, 0.2, 0.28)),
        ("{kind: gspo}", ("token", 2.0, 0.5, 5.0, 3e-4, 4e-4)),
        ("{kind: topr}", ("trajectory", 2.0, 0.5, 5.0, 0.2, 0.28)),
        ("{kind: topr, level: token}", USUAL),
    ],
)
def test_bounds_that_nobody_sets_are_those_of_the_kind(
    tmp_path: Path, correction: str, expected: tuple[str | float, ...]
) -> None:
    """The column "defaults" of algorithms §2."""
    config = load(None, [STEPS, f"correction={correction}"])
    assert bounds(config) == expected
    dump(config, tmp_path / "config.yaml")
    again = load(tmp_path / "config.yaml", ["correction={kind: gspo, level: auto}"])
    assert bounds(again) == ("token", 2.0, 0.5, 5.0, 3e-4, 4e-4), "a resume with another kind"
    assert bounds(from_dict(to_dict(config))) == expected


@pytest.mark.parametrize("kind", ["decoupled", "geo_mask", "gspo", "icepop", "topr"])
def test_bounds_that_somebody_sets_are_nobody_elses(kind: str) -> None:
    given = [
        f"correction={{kind: {kind}, level: token, w_max: 3, low: 0.25, high: 4}}",
        "loss={clip_low: 0.125, clip_high: 0.5}",
    ]
    assert bounds(load(None, [STEPS, *given])) == ("token", 3.0, 0.25, 4.0, 0.125, 0.5)


def test_a_stage_with_another_kind_of_correction_has_the_bounds_of_that_kind() -> None:
    kinds = [{"kind": "geo_mask"}, {"kind": "gspo", "w_max": 9}, {"kind": "topr"}]
    stages = [Stage(steps=1, override={"correction": kind}) for kind in kinds]
    config = Config(stages=[*stages, Stage(steps=1)])
    config.loss.clip_high = 0.3
    assert [bounds(config, index) for index in range(4)] == [
        ("token", 2.0, 0.8, 1.25, 0.2, 0.3),
        ("token", 9.0, 0.5, 5.0, 3e-4, 0.3),
        ("trajectory", 2.0, 0.5, 5.0, 0.2, 0.3),
        ("token", 2.0, 0.5, 5.0, 0.2, 0.3),
    ]


def test_a_weights_directory_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match=r"weights\.dir: /proc cannot be written to"):
        check_paths(load(None, [STEPS, "weights.dir=/proc"]))


def test_a_stage_can_be_appended() -> None:
    config = load(None, [STEPS, "stages+={kind: sft, steps: 4}", "stages.1.expert_fraction=0.5"])
    assert [(stage.kind, stage.steps) for stage in config.stages] == [("rl", 10), ("sft", 4)]
    assert config.stages[1].expert_fraction == 0.5


ROLLBACK = "safety.action=rollback"


def test_a_rollback_changes_the_stage_and_lowers_its_learning_rate_every_time() -> None:
    change = "safety.rollback={selection: {kind: spread}, learner: {lr: 4e-4}}"
    config = load(None, [STEPS, ROLLBACK, change, "stages.0.override={loss: {kl_coef: 0.1}}"])
    stages = [stage_config(config, 0, rollbacks) for rollbacks in range(3)]
    assert [stage.selection.kind for stage in stages] == ["all", "spread", "spread"]
    assert [stage.learner.lr for stage in stages] == pytest.approx([5e-4, 2e-4, 1e-4])
    assert {stage.loss.kl_coef for stage in stages} == {0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["safety.rollback={loss: {kl_coef: 1}}"], "safety.rollback: safety.action=warn never"),
        ([ROLLBACK, "safety.rollback={rollout: {max_turns: 3}}"], "safety.rollback: rollout: must"),
        (
            [ROLLBACK, "safety.rollback={loss: {kl_cof: 1}}"],
            "safety.rollback: loss.kl_cof: unknown",
        ),
        (
            [ROLLBACK, "safety.rollback={learner: {groups_per_step: 3}}"],
            "safety.rollback: learner.groups_per_step: belongs to the whole stage",
        ),
        (
            [ROLLBACK, "safety.rollback={selection: {kind: dynamic}}"],
            "safety.rollback: selection: dynamic",
        ),
        (
            [ROLLBACK, "safety.rollback={learner: {minibatches: 99}}"],
            "safety.rollback: learner.minibatches: must be at most",
        ),
        ([ROLLBACK, "safety.rollback_lr=0"], "safety.rollback_lr: must be greater than 0"),
        ([ROLLBACK, "safety.rollbacks=0"], "safety.rollbacks: must be at least 1"),
    ],
)
def test_what_a_rollback_cannot_change_is_named(arguments: list[str], message: str) -> None:
    said = refusal(*arguments)
    assert said.startswith(message), said


def test_a_stage_may_override_what_would_be_impossible_elsewhere() -> None:
    config = load(None, ["stages=[{hours: 1, override: {learner: {decay: none}}}]"])
    assert stage_config(config, 0).learner.decay == "none"


@pytest.mark.parametrize(("groups", "keep"), [(2, 0.25), (3, 0.5), (5, 0.5), (7, 0.5)])
def test_as_many_updates_are_allowed_as_selection_leaves_groups(groups: int, keep: float) -> None:
    selection = Selection(kind="spread", keep=keep)
    kept = len(kept_groups([1.0] * groups, selection))
    step = [
        "stages=[{steps: 10}]",
        f"selection={{kind: spread, keep: {keep}}}",
        f"learner.groups_per_step={groups}",
    ]
    assert load(None, [*step, f"learner.minibatches={kept}"]).learner.minibatches == kept
    with pytest.raises(ConfigError, match=r"learner\.minibatches: must be at most"):
        load(None, [*step, f"learner.minibatches={kept + 1}"])


@pytest.mark.parametrize("text", ["learner: [", "- a\n- b\n", "learner: {lr: 1}\nlearner: {}\n"])
def test_a_recipe_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=str(recipe)):
        load(recipe, [])
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load(tmp_path / "missing.yaml", [])


def test_a_dumped_configuration_loads_back_equal(tmp_path: Path) -> None:
    config = load(None, [STEPS, "correction.w_max=inf", "env.params={size: 4, names: [a, b]}"])
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml", []) == config


def test_the_plain_dict_form_is_finite_and_loads_back_equal() -> None:
    config = load(None, [STEPS, "correction.w_max=inf", "env.params={size: 4}"])
    plain = to_dict(config)
    assert plain["correction"]["w_max"] == "inf"
    restored = from_dict(plain)
    assert restored == config
    assert math.isinf(restored.correction.w_max)


def test_the_reference_names_every_key_with_default_and_comment() -> None:
    text = reference()
    assert "| `learner.lr` | `0.0005` |" in text
    assert "| `env.latency.sigma` | `1.0` | of the logarithm |" in text
    assert '| `policy.path` | `""` | a Hugging Face causal-LM directory' in text
    assert "`stages[i].until_success`" in text


def test_rewriting_the_reference_keeps_what_stands_around_it() -> None:
    text = rewrite(f"before\n{BEGIN}\n(outdated)\n{END}\nafter\n")
    assert text.startswith("before\n") and text.endswith("after\n") and "(outdated)" not in text
    assert rewrite(text) == text


def test_the_documented_reference_is_up_to_date() -> None:
    page = "docs/configuration.md"
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    assert rewrite(text) == text, f"run: python -m evolver_async.config.reference {page}"


def test_a_recipe_says_what_differs_from_its_base(tmp_path):
    (tmp_path / "low.yaml").write_text("learner: {lr: 0.5, minibatches: 2}\nrun: {seed: 3}\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mid.yaml").write_text("base: ../low.yaml\nlearner: {lr: 0.25}\n")
    (tmp_path / "top.yaml").write_text("base: deep/mid.yaml\nrun: {seed: 4}\n")
    config = load(tmp_path / "top.yaml", [STEPS, "learner.minibatches=1"])
    assert (config.learner.lr, config.learner.minibatches, config.run.seed) == (0.25, 1, 4)


@pytest.mark.parametrize(
    "base, message",
    [
        ("missing.yaml", "missing.yaml: No such file"),
        ("b.yaml", "based on this very"),
        ("[1]", "path"),
    ],
)
def test_a_base_that_cannot_be_is_named(tmp_path, base, message):
    (tmp_path / "a.yaml").write_text(f"base: {base}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "a.yaml", [])


RECIPES = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_short(recipe: Path) -> None:
    load(recipe)
    assert len(recipe.read_text().splitlines()) <= 40
