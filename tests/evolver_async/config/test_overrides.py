"""Overrides of a stage and of a rollback: their effect, and keys that they cannot change."""

import pytest
from refusals import STEPS, refusal

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load, stage_config


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


def test_an_empty_mapping_empties_one_of_free_keys() -> None:
    first = ["env.name=bandit", "env.params.high=0.7", "eval.sets.other.env.params.high=0.8"]
    config = load(None, [STEPS, *first])
    assert config.env.params and config.eval.sets["other"].env.params
    assert load(None, [STEPS, *first, "eval.sets={}"]).eval.sets == {}
    config = load(None, [STEPS, *first, "env.params={}", "eval.sets.other.env.params={}"])
    assert config.env.params == {} and config.eval.sets["other"].env.params == {}
    assert config.env.name == "bandit"


def test_a_mask_is_narrower_where_no_data_is_stale_unless_it_is_written() -> None:
    def bounds(*dotlist: str) -> tuple[float, float]:
        given = ["advantage.kind=grpo", "correction.kind=geo_mask", "buffer.max_staleness=0"]
        correction = stage_config(load(None, [STEPS, *given, *dotlist]), 0).correction
        return correction.low, correction.high

    assert bounds() == (0.99, 1.01)
    assert bounds("correction.low=0.5") == (0.5, 1.01)
    assert bounds("buffer.max_staleness=1") == (0.8, 1.25)
    assert bounds("policy.dtype=bfloat16") == (0.8, 1.25), "rounding alone leaves the narrow ones"
    assert bounds("policy.dtype=bfloat16", "correction.high=1.01") == (0.8, 1.01)


def test_gspo_clips_no_rounding() -> None:
    """Without an anchor of the learner's own, the ratio holds how engine and learner round."""
    given = [STEPS, "correction={kind: gspo, anchor: interpolate}", "policy.dtype=bfloat16"]
    with pytest.raises(ConfigError, match=r"^correction\.anchor: must be recompute"):
        load(None, given)
    for other in (
        "policy.dtype=float32",
        "correction.anchor=recompute",
        "loss={clip_low: 0.1, clip_high: 0.1}",
    ):
        load(None, [*given, other])


def test_a_correction_of_ones_own_may_have_an_interpolated_anchor() -> None:
    def anchor(kind: str) -> str:
        given = [f"correction.kind={kind}", "correction.anchor=interpolate"]
        return stage_config(load(None, [STEPS, *given]), 0).correction.anchor

    assert anchor("examples.gaussian:gaussian") == "interpolate"
    assert anchor("ppo") == "recompute"


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
        "reward.success",
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
    assert said.startswith(f"stages[0].override.{key}: belongs to the whole run")


def test_a_stage_overrides_what_the_buffer_reads_anew_in_every_stage() -> None:
    changes = {"max_staleness": 2, "sampler": "freshest", "straggler": "wait", "demo_groups": 64}
    config = load(None, [STEPS, f"stages.0.override={{buffer: {changes}}}"])
    assert stage_config(config, 0).buffer.demo_groups == 64


def test_a_stage_may_override_what_would_be_impossible_elsewhere() -> None:
    config = load(None, ["stages=[{hours: 1, override: {learner: {decay: none}}}]"])
    assert stage_config(config, 0).learner.decay == "none"


ROLLBACK = "safety.action=rollback"


def test_a_rollback_changes_the_stage_and_lowers_its_learning_rate_every_time() -> None:
    kept = "experience: {keep_copied: 9}, critic: {warmup: 2}"  # keys that the learner alone reads
    change = f"safety.rollback={{selection: {{kind: spread}}, learner: {{lr: 4e-4}}, {kept}}}"
    used = ["experience.kind=contrast", "advantage.kind=gae"]
    override = "stages.0.override={loss: {kl_coef: 0.1}}"
    config = load(None, [STEPS, ROLLBACK, change, *used, override])
    stages = [stage_config(config, 0, rollbacks) for rollbacks in range(3)]
    assert [stage.selection.kind for stage in stages] == ["all", "spread", "spread"]
    assert [stage.learner.lr for stage in stages] == pytest.approx([5e-4, 2e-4, 1e-4])
    assert [stage.experience.keep_copied for stage in stages] == [0, 9, 9]
    assert [stage.critic.warmup for stage in stages] == [0, 2, 2]
    assert {stage.loss.kl_coef for stage in stages} == {0.1}
