"""Checks of what an environment returns, so that a wrong type is its failure and names it."""

from numbers import Real

from evolver_async.env import Info, Step


def checked_observation(value: object) -> str:
    """Return `value`; TypeError if it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"an observation must be a text, is {_described(value)}")
    return value


def checked_step(value: object) -> Step:
    """Return `value`; TypeError, which names the field, if it is not a Step of the right types."""
    if not isinstance(value, Step):
        raise TypeError(f"step must return a Step, returned {_described(value)}")
    checked_observation(value.observation)
    if not isinstance(value.reward, Real):
        raise TypeError(f"reward of the Step must be a number, is {_described(value.reward)}")
    if not isinstance(value.info, Info):
        raise TypeError(f"info of the Step must be an Info, is {_described(value.info)}")
    return value


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
