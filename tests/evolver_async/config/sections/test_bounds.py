"""Bounds of the correction and the loss that are left open to `correction.kind`."""

from pathlib import Path

import pytest
from refusals import STEPS

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump, from_dict, load, stage_config, to_dict


@pytest.mark.parametrize("kind", ["none", "ppo", "cispo", "topr"])
def test_a_kind_that_compares_no_anchor_with_mu_ignores_interpolation(kind: str) -> None:
    """Also in one stage alone, and where guided tokens have no interpolated anchor."""
    recipe = Path(__file__).parents[4] / "configs" / "frozen_lake.yaml"
    config = load(recipe, [f"correction.kind={kind}"])
    assert [stage_config(config, i).correction.anchor for i in range(2)] == ["recompute"] * 2

    override = f"{{correction: {{kind: {kind}}}}}"
    config = load(recipe, [f"stages.1.override={override}"])
    anchors = [stage_config(config, i).correction.anchor for i in range(2)]
    assert anchors == ["interpolate", "recompute"]

    guided = ["experience.kind=contrast", "loss.boost=0", f"correction.kind={kind}"]
    config = load(None, [STEPS, *guided, "correction.anchor=interpolate"])
    assert stage_config(config, 0).correction.anchor == "recompute"


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
        *((f"{{kind: {kind}}}", ("token", 20.0, *USUAL[2:])) for kind in ("m2po", "dppo_tv")),
    ],
)
def test_bounds_that_nobody_sets_are_those_of_the_kind(
    tmp_path: Path, correction: str, expected: tuple[str | float, ...]
) -> None:
    """The defaults of every correction."""
    config = load(None, [STEPS, f"correction={correction}"])
    assert bounds(config) == expected
    dump(config, tmp_path / "config.yaml")
    again = load(tmp_path / "config.yaml", ["correction={kind: gspo, level: auto}"])
    assert bounds(again) == ("token", 2.0, 0.5, 5.0, 3e-4, 4e-4), "a resume with another kind"
    assert bounds(from_dict(to_dict(config))) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("decoupled", ("token", 3.0, 0.5, 5.0, 0.125, 0.5)),
        ("geo_mask", ("token", 2.0, 0.25, 4.0, 0.125, 0.5)),
        ("gspo", ("token", 3.0, 0.5, 5.0, 0.125, 0.5)),
        ("icepop", ("token", 2.0, 0.25, 4.0, 0.125, 0.5)),
        ("topr", USUAL),
    ],
)
def test_bounds_that_somebody_sets_are_those_where_the_kind_reads_them(
    kind: str, expected: tuple[str | float, ...]
) -> None:
    given = [
        f"correction={{kind: {kind}, level: token, w_max: 3, low: 0.25, high: 4}}",
        "loss={clip_low: 0.125, clip_high: 0.5}",
    ]
    assert bounds(load(None, [STEPS, *given])) == expected


def test_a_stage_with_another_kind_of_correction_has_the_bounds_of_that_kind() -> None:
    kinds = [{"kind": "geo_mask"}, {"kind": "gspo", "w_max": 9}, {"kind": "topr"}]
    stages = [StageConfig(steps=1, override={"correction": kind}) for kind in kinds]
    config = Config(stages=[*stages, StageConfig(steps=1)])
    config.loss.clip_high = 0.3
    assert [bounds(config, index) for index in range(4)] == [
        ("token", 2.0, 0.8, 1.25, 0.2, 0.3),
        ("token", 9.0, 0.5, 5.0, 3e-4, 0.3),
        ("trajectory", 2.0, 0.5, 5.0, 0.2, 0.28),  # topr clips no ratio
        ("token", 2.0, 0.5, 5.0, 0.2, 0.3),
    ]
