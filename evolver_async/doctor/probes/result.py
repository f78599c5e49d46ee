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


def gib(count: float) -> str:
    """Format a number of bytes."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
