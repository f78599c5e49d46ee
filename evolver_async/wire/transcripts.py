"""Episodes as text, for experience and judges."""

import msgspec


class Turn(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One turn as text: observation, short key of the state, action and all of the policy's text.

    `action` is "" if it could not be read.
    """

    observation: str
    state: str
    action: str
    text: str = ""

    @property
    def said(self) -> str:
        """The policy's text if it is known, else the action."""
        return self.text or self.action


class Transcript(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One finished episode as text, from which experience and judges learn."""

    trajectory_id: str
    reward: float
    success: bool
    experience_ids: list[int]
    turns: list[Turn]
