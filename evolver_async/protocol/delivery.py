"""Messages that deliver finished members to the buffer, and their receipts."""

import msgspec

from evolver_async.schema import Trajectory


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, eq=False, tag_field="type"):
    """Anything that crosses the wire; the tag `type` names its kind."""

    @property
    def kind(self) -> str:
        """The tag in capitals, as logs and documents write it."""
        return str(self.__struct_config__.tag).upper()


class Push(Message, tag="push"):
    """One finished member; kept by the sender until a reply."""

    trajectory: Trajectory


class Pushes(Message, tag="pushes"):
    """Several PUSHes in one message, each under a number of its own (`ids`).

    The client's transport makes it, and the server's takes it apart again: no service sees it.
    """

    ids: list[int]
    trajectories: list[Trajectory]

    def __post_init__(self) -> None:
        if not 0 < len(self.ids) == len(self.trajectories):
            raise ValueError(f"ids: {len(self.ids)}, trajectories: {len(self.trajectories)}")
        if len(set(self.ids)) < len(self.ids) or min(self.ids) < 0:
            raise ValueError("ids: negative, or a number twice")


class Reject(Message, tag="reject"):
    """Refusal of a request; the reason names the field or both sides' values."""

    reason: str


class Ack(Message, tag="ack"):
    """Receipt: the member is on disk."""


class Dup(Message, tag="dup"):
    """Receipt of a copy: the member was accepted before."""


class Stale(Message, tag="stale"):
    """Receipt of a member of no open group."""


class Retry(Message, tag="retry"):
    """Request to try again after `seconds`."""

    seconds: float


class Receipts(Message, tag="receipts"):
    """Replies to PUSHES, in the order of its numbers."""

    ids: list[int]
    replies: list[Ack | Dup | Stale | Retry | Reject]
