"""The result of a probe."""

from dataclasses import dataclass, field
from typing import Any

FLASH_CAPABILITY = (8, 0)  # Ampere: bfloat16 and flash attention


@dataclass(frozen=True)
class ProbeResult:
    """Result of one probe: `summary` is for people, `facts` are plain values for the checks."""

    works: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)
