"""Episodes of the abacus environment."""

from typing import Any

import msgspec
from rollouts import (
    setting,
    ticket,
)

from actors.formats.turns import FORMATS
from actors.rollout.episode_config import Setting
from evolver_async.schema import Sampling, Ticket


def styled(name: str, think: bool = False, actions_per_turn: int = 1, **changes: Any) -> Setting:
    style = FORMATS[name](think=think, actions_per_turn=actions_per_turn)
    return setting(**({"format": style} | changes))


def abacus(members: int = 1, max_tokens: int = 24) -> Ticket:
    asked = ticket({}, members, env="abacus:Abacus")
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    return msgspec.structs.replace(asked, sampling=sampling)
