"""Counts of failures that processes report to the buffer."""

from typing import Annotated, Literal

import msgspec

FailureKind = Literal[
    "agent",  # an agent of the user: it raised, was late, or returned no reward
    "agent_call",  # a refused call of such an agent
    "environment",
    "reward",  # a reward term of the user: it raised, or returned no finite number
    "late",  # an episode that missed its deadline by the policy's fault
    "policy",  # a group without a readable turn
    "engine",  # the processes of an actor's engine have died
    "weights",  # a version that an engine with older weights could not adopt
    "data",  # a row of `data` that cannot be learnt, by reason
    "host",  # one with other versions than the buffer's
    "judge",  # this and the following: an endpoint or its answer
    "experience",
    "questioning",
    "reflection",
]
NAME_CHARS, ERROR_CHARS = 200, 400  # of a failure


class FailureTotal(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Failures of one kind and name since their sender's start; `error` describes the last one."""

    kind: FailureKind
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARS)]
    error: Annotated[str, msgspec.Meta(max_length=ERROR_CHARS)]
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]

    def __str__(self) -> str:
        if self.kind == "host":  # it is not as the buffer's, and nothing has failed
            return f"host {self.name} has {self.error}"
        if self.kind == "data":
            rows = "a row is" if self.count == 1 else f"{self.count:,} rows are"
            return f"{rows} left out ({self.name}), last: {self.error}"
        times = "once" if self.count == 1 else f"{self.count:,} times"
        return f"{self.kind.replace('_', ' ')} {self.name} failed {times}, last: {self.error}"
