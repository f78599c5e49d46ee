"""Values and combinations of keys that cannot work, each refused by its key."""

from pathlib import Path

import pytest

from evolver_async.config import SelectionConfig
from evolver_async.config.ablation import lines
from evolver_async.config.load import load, stage_config
from learner.data.selection import spread


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


@pytest.mark.parametrize("kind", ["sft", "world_model", "reflect", "reward_model", "dpo", "kto"])
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


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dpo", "loss: {dpo_beta: 0.2, dpo_nll_coef: 1, entropy_top_k: 4, mask_truncated: true}"),
        ("kto", "loss: {kto_beta: 0.2, kto_desirable: 2, mask_truncated: true}"),
        ("reward_model", "loss: {mask_truncated: true}, reward_model: {centre_coef: 0.1}"),
    ],
)
def test_a_stage_of_preferences_can_change_what_it_reads(kind: str, changes: str) -> None:
    changes = f"{changes}, selection: {{max_empty: 9}}, rollout: {{temperature: 0.7}}"
    config = load(None, [f"stages=[{{kind: {kind}, steps: 1, override: {{{changes}}}}}]"])
    staged = stage_config(config, 0)
    assert staged.selection.max_empty == 9 and staged.loss.mask_truncated
    assert not [line for line in lines(config) if "override" in line]


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
