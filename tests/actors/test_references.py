"""References to environment variables that an actor checks before it asks for tasks."""

import pytest

from actors.main import check_references
from evolver_async.config.load import load

STAGE = "stages=[{kind: rl, steps: 9}]"
UNSET = "${oc.env:EVOLVER_TEST_UNSET}"


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        (f"env.params.url={UNSET}", r"env\.params\.url"),
        (
            f"tasks.mixture=[{{env: bandit}}, {{env: openenv, params: {{url: '{UNSET}'}}}}]",
            r"tasks\.mixture\[1\]\.params\.url",
        ),
        (
            f"eval.sets.far.env={{name: openenv, params: {{url: '{UNSET}'}}}}",
            r"eval\.sets\.far\.env\.params\.url",
        ),
    ],
)
def test_a_variable_that_an_actor_lacks_is_named_with_its_key(
    argument: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, [STAGE, argument])
    with pytest.raises(ValueError, match=rf"^{key}: the environment variable EVOLVER_TEST_UNSET"):
        check_references(config)
    monkeypatch.setenv("EVOLVER_TEST_UNSET", "http://localhost")
    check_references(config)
