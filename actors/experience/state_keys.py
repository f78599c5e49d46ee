"""Keys of states: short states themselves, long ones shortened so that they stay different."""

import hashlib
import re

STATE_BYTES = 200  # of a key in UTF-8
HASHED = re.compile(r" #[0-9a-f]{16}$")
LEFT_OUT = " … "


def state_key(state: str) -> str:
    """Return a key of at most `STATE_BYTES` bytes of UTF-8: equal only for equal states.

    A longer state becomes its beginning, its end and a hash of the whole. The key depends on
    nothing but the state, so that keys of different groups can be compared.
    """
    encoded = state.encode(errors="surrogatepass")
    if len(encoded) <= STATE_BYTES:
        return state
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    share = (STATE_BYTES - len(f"{LEFT_OUT} #{digest}".encode())) // 2
    end = encoded[-share:].decode(errors="ignore")
    return f"{beginning(state, share)}{LEFT_OUT}{end} #{digest}"


def readable(key: str) -> str:
    """Return the part of a key that a policy can compare with what it sees."""
    return HASHED.sub("", key)


def beginning(text: str, limit: int) -> str:
    """Return the beginning of a text, at most `limit` bytes of UTF-8."""
    encoded = text.encode(errors="surrogatepass")
    return text if len(encoded) <= limit else encoded[:limit].decode(errors="ignore")
