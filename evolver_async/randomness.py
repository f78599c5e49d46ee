"""Keyed random draws: every draw has a seed of its own, by the run's seed and its purpose."""

import hashlib


def key(seed: int, *parts: int | str) -> int:
    """Hash a seed and the purpose of a random draw to a 63-bit seed of its own."""
    text = "/".join(str(part) for part in (seed, *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, *parts: int | str) -> float:
    """Draw a number in [0, 1) that depends only on the seed and the parts."""
    return key(seed, *parts) / (1 << 63)
