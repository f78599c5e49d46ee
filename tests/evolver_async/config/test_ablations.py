"""Every shipped recipe with one key changed: a mechanism off, or a value beside the recipe's."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from refusals import STEPS

from evolver_async.config import Config, ConfigError
from evolver_async.config.ablation import lines
from evolver_async.config.effective.changes import value_of
from evolver_async.config.load import check_run, load, stage_config
from evolver_async.config.values.rules import Open, Range, keys, rule

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted({*CONFIGS.rglob("*.yaml")} - {*CONFIGS.glob("studies/*")})
RULES = dict(keys(Config))
OFF: dict[str, tuple[Any, ...]] = {
    "experience.kind": ("none",),
    "experience.internalise": ("none",),
    "rollout.guided_fraction": (0.0,),
    "judge.kind": ("none",),
    "questioning.kind": ("none",),
    "tasks.synthetic": (0.0,),
    "tasks.train": (0,),
    "reflection.kind": ("template",),
    "selection.kind": ("all",),
    "advantage.kind": ("grpo",),
    "advantage.alpha": (0.0,),
    "advantage.overlong_limit": (0,),
    "advantage.overlong_cache": (0,),
    "correction.kind": ("none",),
    "correction.anchor": ("recompute", "interpolate"),
    "loss.kl_coef": (0.0,),
    "loss.entropy_coef": (0.0,),
    "loss.boost": (0.0,),
    "loss.target_kl": (float("inf"),),
    "buffer.max_staleness": (0, 1),
    "buffer.max_ready": (0.0,),
    "buffer.reuse": (1,),
    "learner.groups_per_step": (2,),
    "learner.minibatches": (1,),
    "learner.decay": ("none",),
    "rollout.max_turns": (1,),
    "rollout.context": ("full",),
    "rollout.think": (False,),
    "rollout.format_errors": (0,),
    "env.latency.kind": ("none",),
    "eval.every": (0,),
    "eval.final_episodes": (0,),
    "safety.action": ("warn",),
    "policy.lora.rank": (0,),
}
# By a key: the keys whose present values exclude some of its own. All else loads.
EXCLUDED: dict[str, tuple[str, ...]] = {
    # the launch names as many GPUs as there are processes
    "actors.count": ("launch.gpus.actors",),
    "learner.ranks": ("launch.gpus.learner",),
    "engine.tensor_parallel": ("launch.gpus.actors",),
    "engine.kind": ("engine.tensor_parallel",),
    # a reply is shorter than the context, which is at most the run's and fits into a pass
    "rollout.max_tokens": ("rollout.max_tokens",),
    "policy.max_length": ("rollout.max_tokens", "policy.max_length", "learner.token_budget"),
    "learner.token_budget": ("learner.token_budget",),
    "judge.kind": ("judge.max_tokens", "judge.llm.url"),
    # an endpoint has a URL
    "experience.kind": ("experience.llm.url",),
    "questioning.kind": ("questioning.llm.url",),
    # a demonstration follows the lesson before it; `distill` compares members of a group
    "experience.internalise": ("experience.internalise",),
    "rollout.guided_fraction": ("rollout.guided_fraction",),
    # a group of one has nothing to compare
    "advantage.kind": ("rollout.group_size",),
    "selection.kind": ("rollout.group_size", "safety.rollback: selection"),
    "rollout.group_size": ("rollout.group_size", "selection.members"),
    "selection.members": ("selection.members",),
    # its gradient in the loss is zero on average
    "loss.kl": ("loss.kl",),
    # a step of the environment ends before the limits around it
    "env.step_timeout_s": ("env.step_timeout_s", "eval.timeout_s"),
    # addresses of other hosts
    "weights.kind": ("weights.kind", "weights.address"),
    "weights.trusted_network": ("weights.trusted_network",),
}


def written(recipe: Path) -> Iterator[tuple[int | None, str, Any]]:
    """The keys that the file of a recipe names, with their values: of the run, of its stages."""
    tree = yaml.safe_load(recipe.read_text())
    for index, stage in enumerate(tree.pop("stages", [])):
        yield from ((index, *found) for found in below(stage.get("override", {})))
    yield from ((None, *found) for found in below(tree))


def below(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if f"{prefix}{name}" in RULES:
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from below(value, f"{prefix}{name}.")


def neighbours(key: str, value: Any) -> list[Any]:
    """The other choices of a key; half and twice a number, where its field allows them."""
    annotation = RULES[key]
    allowed = rule(annotation)
    if get_origin(annotation) is Literal:
        return [one for one in get_args(annotation) if one != value]
    if isinstance(allowed, Open):
        return [one for one in allowed.names if one != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float) and isinstance(allowed, Range):
        near = (type(value)(value * 2), type(value)(value / 2))
        return [one for one in near if one != value and allowed.allows(one)]
    return []


def changed(config: Config, stage: int | None, key: str, value: Any) -> Config:
    """The run with one key changed, or with one of a stage's override."""
    if stage is None:
        return put(config, key.split("."), value)
    stages = list(config.stages)
    override = put_into(stages[stage].override, key.split("."), value)
    stages[stage] = replace(stages[stage], override=override)
    return replace(config, stages=stages)


def put(node: Any, parts: list[str], value: Any) -> Any:
    name, *rest = parts
    return replace(node, **{name: put(getattr(node, name), rest, value) if rest else value})


def put_into(tree: dict[str, Any], parts: list[str], value: Any) -> dict[str, Any]:
    name, *rest = parts
    return tree | {name: put_into(tree.get(name, {}), rest, value) if rest else value}


def refused(config: Config) -> str:
    """The beginning of the error, behind the name of an override; "" if the run loads."""
    try:
        check_run(config)
    except ConfigError as error:
        return re.sub(r"^stages\[\d+\]\.override: ", "", str(error))
    return ""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_nothing_as_shipped_and_loads_with_a_mechanism_off(recipe: Path) -> None:
    config, problems = load(recipe), []
    assert lines(config) == []
    own = [(stage, key) for stage, key, _ in written(recipe) if stage is not None and key in OFF]
    places = [*((None, key) for key in OFF), *own]
    for stage, key, value in ((*place, one) for place in places for one in OFF[place[1]]):
        if stage is None and value_of(config, key) == value:
            continue
        ablated = changed(config, stage, key, value)
        problem = refused(ablated)
        assert problem or len(lines(ablated)) <= 2
        if problem and not problem.startswith(EXCLUDED.get(key, ("never",))):
            problems.append((stage, key, value, problem))
    assert problems == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_values_beside_those_of_a_recipe_load_or_are_impossible(recipe: Path) -> None:
    config, problems = load(recipe), []
    for stage, key, value in written(recipe):
        for other in neighbours(key, value):
            problem = refused(changed(config, stage, key, other))
            if problem and not problem.startswith(EXCLUDED.get(key, ("never",))):
                problems.append((stage, key, other, problem))
    assert problems == []


@pytest.mark.process
def test_a_configuration_is_checked_without_torch() -> None:
    recipe = CONFIGS / "agentevolver.yaml"
    code = (
        "import sys; from evolver_async.config.load import load;"
        " from evolver_async.config.ablation import lines;"
        f" print(len(lines(load({str(recipe)!r}, ['judge.kind=none']))), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["1", "False"]


def of_stage(kind: str, override: str) -> str:
    return f"stages=[{{kind: {kind}, steps: 1, override: {{{override}}}}}]"


CONTRAST = "experience.kind=contrast"
DISTILL = "experience={kind: contrast, internalise: distill}"
STEP = "learner.minibatches=1"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["engine.merge_lora=true", "policy.lora.rank=4"], "engine.merge_lora"),
        (["engine={kind: vllm, merge_lora: true}"], "engine.merge_lora"),
        (["engine.options.seed=1"], "engine.options"),
        (["buffer.max_ready=5"], "buffer.max_ready"),
        (["buffer.max_ready=2", "buffer.reuse=3"], "buffer.max_ready"),
        (["buffer.max_ready=1", "buffer.max_staleness=0"], "buffer.max_ready"),
        (["buffer.params={x: 1}"], "buffer.params"),
        (["rollout.guided=failed"], "rollout.guided"),
        (["tasks={train: 0, solved: 0.5}"], "tasks.solved"),
        (["tasks={train: 0, failed: 0.5}"], "tasks.failed"),
        (["tasks={synthetic: 0.5, solved: 0.5}"], "tasks.solved"),
        (["tasks.prompt=question"], "tasks.prompt"),
        (["loss.kl=k1"], "loss.kl"),
        (["loss.dpo_nll_coef=1"], "loss.dpo_nll_coef"),
        (["loss.boost=0.6"], "loss.boost"),
        ([CONTRAST, "correction.kind=cispo", "loss.boost=0.6"], "loss.boost"),
        ([CONTRAST, STEP, "loss.boost=0.6"], "loss.boost"),
        ([DISTILL, "loss.boost=0.6"], "loss.boost"),
        ([DISTILL, "experience.reliance_coef=1"], "experience.reliance_coef"),
        (
            ["experience={kind: contrast, internalise: none, strip_fraction: 0.5, keep_copied: 4}"],
            "experience.strip_fraction, experience.keep_copied",
        ),
        (["experience={kind: contrast, rewrite: true}"], "experience.rewrite"),
        (
            ["experience={top_k: 3, vet: true, llm: {model: m}}"],
            "experience.vet, experience.top_k, experience.llm.model",
        ),
        (["judge={params: {x: 1}, probes: 0.5}"], "judge.params, judge.probes"),
        (["judge={kind: rule, probes: 0.5}"], "judge.probes"),
        (["advantage={kind: adca, alpha: 0.3}"], "advantage.alpha"),
        (["advantage.alpha=0.3"], "advantage.alpha"),
        (["questioning={kind: goals, resolve: true}"], "questioning.resolve"),
        (["questioning={kind: goals, profile: a.json}"], "questioning.profile"),
        (
            ["questioning={every: 3, temperature: 0.5}"],
            "questioning.every, questioning.temperature",
        ),
        (["selection={members: 4, params: {x: 1}}"], "selection.members, selection.params"),
        (["advantage={params: {x: 1}, lam: 0.5}"], "advantage.lam, advantage.params"),
        (["correction={kind: gspo, level: trajectory}"], "correction.level"),
        (["correction={kind: vcpo, level: token}"], "correction.level"),
        (["correction={kind: cispo, anchor: interpolate}"], "correction.anchor"),
        (["correction={kind: cispo, w_max: 3}", "loss.clip_high=0.3"], "loss.clip_high"),
        (["critic={lr: 0.1}"], "critic.lr"),
        (["teacher={coef: 2, top_k: 4}"], "teacher.top_k, teacher.coef"),
        (["teacher={path: t, beta: 0.3}"], "teacher.beta"),
        (["teacher={path: t, model: m, top_k: 4}"], "teacher.model, teacher.top_k"),
        (["teacher={path: t, coef: 0, divergence: jsd}"], "teacher.path, teacher.divergence"),
        (["safety.rollback={loss: {boost: 0.6}}"], "safety.rollback"),
        (
            ["safety={action: rollback, rollback: {loss: {boost: 0.6}}}"],
            "safety.rollback.loss.boost",
        ),
        (["eval={every: 0, sets: {a: {every: 5}}}"], "eval.sets.a.every"),
        (["eval.sets.a.guided=true"], "eval.sets.a.guided"),
        (["stages.0.until_success=0.9", "eval.every=0"], "stages[0].until_success"),
        (["stages.0.refresh_reference=true"], "stages[0].refresh_reference"),
        *(
            ([of_stage(kind, f"{section}: {{{name}: {value}}}")], f"stages[0].override.{key}")
            for kind, section, name, value in (
                ("sft", "loss", "aggregation", "sequence_mean"),
                ("world_model", "advantage", "kind", "rloo"),
                ("reflect", "rollout", "temperature", "0.7"),
                ("sft", "buffer", "sampler", "freshest"),
                ("sft", "buffer", "straggler", "wait"),
                ("sft", "tasks", "synthetic", "0.5"),
                ("sft", "safety", "patience", "9"),
                ("dpo", "loss", "kl_coef", "0.1"),
                ("dpo", "correction", "w_max", "3"),
                ("dpo", "critic", "lr", "0.1"),
                ("dpo", "selection", "kind", "spread"),
                ("dpo", "selection", "keep", "0.25"),
                ("dpo", "experience", "reliance_coef", "1"),
                ("kto", "loss", "dpo_beta", "0.2"),
                ("kto", "advantage", "kind", "rloo"),
                ("reward_model", "loss", "kto_beta", "0.2"),
                ("reward_model", "loss", "entropy_top_k", "4"),
                ("dpo", "reward_model", "centre_coef", "0.1"),
                ("rl", "tasks", "solved", "0"),
                ("dpo", "teacher", "loss_coef", "0.5"),
            )
            for key in (f"{section}.{name}",)
        ),
    ],
)
def test_what_nothing_reads_is_named_and_cannot_act(arguments: list[str], named: str) -> None:
    config = load(None, [STEPS, *arguments])
    found = [line for line in lines(config) if line.startswith("inert: ")]
    assert (len(found) == 1 and f"{named} (" in found[0]) or f"{named}," in found[0], found
    key = re.sub(r"^stages\[\d+\]\.(override\.)?", "", named.split(",")[0])
    closed = key in ("correction.level", "loss.clip_high")  # by the kind of correction
    if key in RULES and not closed and not named.startswith("stages"):
        assert value_of(stage_config(config, 0), key) == value_of(Config(), key)
        assert value_of(config, key) != value_of(Config(), key), "as written"


@pytest.mark.parametrize(
    ("arguments", "key", "before", "after"),
    [
        (["buffer.reuse=6"], "buffer.reuse", 6, 5),
        (
            ["buffer.max_staleness=2", "actors.weight_lag=2", "buffer.reuse=2"],
            "buffer.reuse",
            2,
            1,
        ),
        (["learner.groups_per_step=2"], "learner.minibatches", 4, 2),
        (["selection.kind=spread", "learner.minibatches=17"], "learner.minibatches", 17, 16),
        (["selection={kind: top_k, k: 2}"], "learner.minibatches", 4, 2),
        (["advantage.kind=adca"], "advantage.kind", "adca", "grpo"),
        (["advantage.kind=vtrace"], "correction.kind", "decoupled", "none"),
        (["advantage.overlong_limit=10"], "advantage.overlong_cache", 0, 1),
        (["advantage={overlong_limit: 9, overlong_cache: 10}"], "advantage.overlong_cache", 10, 9),
        (["selection={kind: resample_on_correct, members: 99}"], "selection.members", 99, 8),
        ([CONTRAST, "rollout.guided_fraction=0.05"], "rollout.guided_fraction", 0.05, 0),
        (
            [CONTRAST, "correction.anchor=interpolate"],
            "correction.anchor",
            "interpolate",
            "recompute",
        ),
        *(
            ([f"advantage.kind={kind}", "rollout.max_turns=1"], "advantage.kind", kind, same)
            for kind, same in (("grpo_process", "grpo"), ("gae_bilevel", "gae"))
        ),
    ],
)
def test_what_has_no_room_takes_the_nearest_value_and_is_named(
    arguments: list[str], key: str, before: Any, after: Any
) -> None:
    config = load(None, [STEPS, *arguments])
    assert f"{key} {before} → {after}" in "".join(
        line for line in lines(config) if line.startswith("changed: ")
    )
    assert (value_of(config, key), value_of(stage_config(config, 0), key)) == (before, after)


def test_what_acts_on_guided_data_keeps_its_value_where_none_is_made() -> None:
    """Guided data can be left from before a resume that sets the share to 0."""
    config = load(None, [STEPS, CONTRAST, "rollout.guided_fraction=0", "loss.boost=0.6"])
    (line,) = lines(config)
    assert line.startswith("inert: loss.boost (rollout.guided_fraction=0)")
    assert stage_config(config, 0).loss.boost == 0.6


def test_of_a_changed_configuration_only_the_changes_are_told() -> None:
    before = load(None, [STEPS, "loss.kl=k1"])
    assert lines(before) and not lines(before, before=before)
    (line,) = lines(load(None, [STEPS, "loss.kl=k1", "loss.boost=0.6"]), before=before)
    assert line.startswith("inert: loss.boost (") and "loss.kl" not in line


def test_a_change_names_the_stages_in_which_it_is_made() -> None:
    (line,) = lines(load(CONFIGS / "frozen_lake.yaml", ["learner.groups_per_step=2"]))
    assert line.startswith("changed: learner.minibatches 4 → 2 (") and line.endswith("stages[1]")


def test_what_one_stage_or_a_rollback_reads_is_not_named() -> None:
    stages = "stages=[{kind: rl, steps: 1}, {kind: rl, steps: 1, override: {%s}}]"
    for arguments, override in (
        ([CONTRAST, "loss.boost=0.6"], "rollout: {guided_fraction: 0}"),
        (["selection={kind: spread, keep: 0.25}"], "selection: {kind: all}"),
        (["loss.kl=k2"], "loss: {kl_coef: 0.1}"),
        (["safety={action: rollback, rollback: {loss: {kl_coef: 0.1}}}", "loss.kl=k2"], ""),
    ):
        config = load(None, [*arguments, stages % override])
        assert not any(line.startswith("inert") for line in lines(config)), (arguments, override)


def test_the_switched_off_halves_of_a_line_come_in_one() -> None:
    (line,) = lines(load(CONFIGS / "agentevolver.yaml", ["experience.kind=none"]))
    wanted = ("experience.similarity", "correction.guided", "loss.boost", "rollout.guided_fraction")
    assert [key for key in wanted if key in line] == [*wanted[:1], *wanted[2:]], line
    assert line.count("experience.kind=none") == 1
