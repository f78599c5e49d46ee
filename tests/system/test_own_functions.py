"""Functions of a user's own do what the built-in ones do in one process; see test_ranks.py for
several."""

import math
import traceback

import pytest
from own_runs import FORMAT, KEYS, OWN, check_own_functions, rows_of
from serial_runs import trainer

from evolver_async.buffer.state.samplers import sampler_of
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.errors import TrainingError, Unrecoverable
from evolver_async.extension import implementation
from evolver_async.launch.start_checks import check_start

RECIPE = f"""
env: {{name: bandit}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4, format: "{FORMAT}"}}
actors: {{count: 1, groups: 4}}
loss: {{boost: 0}}
learner: {{groups_per_step: 4, minibatches: 1, decay: none, token_budget: 64}}
stages: [{{kind: rl, steps: 4}}]
eval: {{every: 0, episodes: 4, final_episodes: 0}}
launch: {{kind: serial}}
{OWN}"""


def test_every_key_takes_a_function_in_one_process(tmp_path, caplog) -> None:
    finished = trainer(tmp_path, RECIPE)("run")
    assert len(rows_of(finished.run_dir)) == 4
    check_own_functions(finished.run_dir)
    assert "own_functions:broken_sink failed: RuntimeError: no room" in caplog.text


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_functions:missing", "cannot import 'own_functions:missing': AttributeError"),
        ("no_such_module:function", "cannot import 'no_such_module:function': ModuleNotFoundError"),
        ("own_functions:constant", "'own_functions:constant' is not a function"),
        ("own_functions:too_few", "'own_functions:too_few' does not take ("),
        ("builtins:max", "'builtins:max' does not take ("),  # it has no signature
    ],
)
@pytest.mark.parametrize("key", [*KEYS, "reward.terms"])
def test_an_unfit_function_is_refused_before_the_start(tmp_path, key, name, problem) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE)
    value = f"[{name}]" if key.endswith("s") else name
    config = load(recipe, [f"{key}={value}", f"run.dir={tmp_path}"])
    with pytest.raises(ValueError, match=key) as refused:
        check_start(config)
    assert problem in str(refused.value)


def test_numbers_that_are_prepared_before_the_step_need_an_anchor_then(tmp_path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE)
    own = "{kind: learner.loss.correction:m2po, anchor: interpolate}"
    config = load(recipe, [f"correction={own}", f"run.dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"correction\.anchor: must be recompute: .*m2po prepares"):
        check_start(config)


@pytest.mark.parametrize("key", [key for key in KEYS if not key.endswith("s")])
def test_what_is_neither_built_in_nor_a_path_is_refused(tmp_path, key) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(ConfigError, match=rf"{key}: must be one of .*, or package.module:function"):
        load(recipe, [f"{key}=unknown"])


def test_built_in_names_are_resolved_without_an_import() -> None:
    def one(number: int) -> int:
        return number

    assert implementation("key", "one", {"one": one}) is one


def test_a_reward_term_without_a_number_is_reported(tmp_path) -> None:
    """Its episodes are played again, in vain: the run stops and says why."""
    with pytest.raises(TrainingError, match="broken_bonus returned nan"):
        trainer(tmp_path, RECIPE)("run", "reward=[own_rewards:broken_bonus]")


def test_an_exception_of_a_function_names_its_key() -> None:
    """The note is the last line of the traceback, which the console and a study show."""
    with pytest.raises(OSError, match="the table of ranks is missing") as raised:
        sampler_of("own_functions:broken_order")(None, 0, {})  # pyright: ignore[reportArgumentType]
    said = "".join(traceback.format_exception(raised.value)).splitlines()[-1]
    assert said == (
        "buffer.sampler: own_functions:broken_order raised OSError: the table of ranks is missing"
    )


def test_a_sampler_without_a_number_ends_the_run() -> None:
    """Its groups would be taken in the order of arrival, without a word."""
    sampler, params = sampler_of("own_functions:by_table"), {"ranks": {0: 1.5, 2: math.nan}}
    assert sampler(None, 0, params) == 1.5  # pyright: ignore[reportArgumentType]
    for lag, found in ((1, "None"), (2, "nan")):
        with pytest.raises(Unrecoverable, match=rf"^buffer\.sampler: .*by_table returned {found},"):
            sampler(None, lag, params)  # pyright: ignore[reportArgumentType]


def test_a_function_that_makes_no_turn_format_is_refused_before_the_start(tmp_path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE)
    config = load(recipe, ["rollout.format=own_functions:no_format", f"run.dir={tmp_path}"])
    with pytest.raises(
        ValueError, match=r"^rollout\.format: own_functions:no_format made NoneType"
    ):
        check_start(config)
