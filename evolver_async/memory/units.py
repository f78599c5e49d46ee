"""Bytes, of types and in words."""

MIB = 1 << 20
GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT = DTYPE_BYTES["float32"]


def gib(count: float) -> str:
    """Format a number of bytes in GiB, below one in MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
