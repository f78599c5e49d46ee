"""Parameters of a chat request, without those that a model refuses. Pure.

Models that reason refuse `max_tokens`, for which they have `max_completion_tokens`, and some take
no temperature but their own.
"""

import json
import re
from dataclasses import dataclass, replace

REFUSED = re.compile(r"status 400\b.*(unsupported|not support)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Parameters:
    """Parameters that requests have, by the name of each: its limit of tokens, the temperature."""

    limit: str = "max_tokens"
    temperature: bool = True

    def body(
        self, model: str, messages: list[dict[str, str]], most: int, temperature: float
    ) -> bytes:
        """Write a request as JSON; `most`: limit of the answer's tokens."""
        request = {"model": model, "messages": messages, self.limit: most}
        if self.temperature:
            request["temperature"] = temperature
        return json.dumps(request).encode()

    def after(self, refusal: str) -> "Parameters":
        """Return the parameters for the next call; the same if the message blames none of them."""
        if not REFUSED.search(refusal):
            return self
        if self.limit == "max_tokens" and "max_completion_tokens" in refusal:
            return replace(self, limit="max_completion_tokens")
        if self.temperature and "temperature" in refusal:
            return replace(self, temperature=False)
        return self
