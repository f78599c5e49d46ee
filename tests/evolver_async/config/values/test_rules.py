"""Rules of fields: choices, ranges, and the defaults that they allow."""

import math

import pytest
from refusals import refusal

from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.config.load import check_run
from evolver_async.config.values.rules import OneOf, Range, check_fields, keys, rule

RULES = {key: allowed for key, annotation in keys(Config) if (allowed := rule(annotation))}


@pytest.mark.parametrize("key", [key for key, each in RULES.items() if isinstance(each, OneOf)])
def test_an_unknown_choice_lists_the_allowed_ones(key: str) -> None:
    assert refusal(f"{key}=sideways") == f"{key}: must be {RULES[key]}, is 'sideways'"
    config = Config()
    section, (*path, name) = config, key.split(".")
    for part in path:
        section = getattr(section, part)
    setattr(section, name, "sideways")
    with pytest.raises(ConfigError) as caught:
        check_fields(config)
    assert str(caught.value) == f"{key}: must be {RULES[key]}, is 'sideways'"


@pytest.mark.parametrize(
    ("numbers", "allowed", "refused", "words"),
    [
        (Range(), [0, 2.5], [-0.1, math.inf, math.nan], "at least 0"),
        (Range(gt=0, le=1), [0.1, 1], [0, 1.1], "greater than 0 and at most 1"),
        (Range(ge=1, infinite=True), [1, math.inf], [0.9, math.nan], "at least 1"),
        (Range(gt=0, lt=1, also=-1), [-1, 0.5], [-0.5, 1], "greater than 0 and less than 1, or -1"),
        (Range(ge=-math.inf), [-3], [math.inf, -math.inf, math.nan], "a finite number"),
    ],
)
def test_a_range_allows_what_it_says(numbers, allowed, refused, words) -> None:
    assert all(map(numbers.allows, allowed)) and not any(map(numbers.allows, refused))
    assert str(numbers) == words


def test_the_defaults_are_allowed() -> None:
    check_run(Config(stages=[StageConfig(steps=1)]))
