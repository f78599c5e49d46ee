"""Choice of the slots whose pending context one prefill step reads; pure."""

import numpy as np

from actors.engines.decoding.kv_slots import Slots

MIN_SHARED = 8  # tokens; a shorter common prefix is not worth waiting for a copy


def choose_prefill(
    slots: Slots, behind: np.ndarray, order: np.ndarray, searching: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Choose slots among `behind`, those with pending context; return them in ascending order.

    `order`: clock at which each slot was taken; `searching`: slots that can still copy KV;
    `max_tokens`: tokens of the step, padding included, where equal slots count once. The slot that
    waits longest comes first, followed by those with the most similar lengths, which need the
    least padding.
    """
    pending = slots.total - slots.cached
    behind = behind[order[behind].argsort()]
    firsts, same = slots.distinct(behind, pending[behind])
    rows = behind[firsts]
    nearest = rows[np.lexsort((order[rows], abs(pending[rows] - pending[rows[0]])))]
    chosen: list[int] = []
    longest = 1
    for slot in nearest:
        padded = max(longest, min(int(pending[slot]), max_tokens))
        if chosen and padded * (len(chosen) + 1) > max_tokens:
            break
        if searching[slot] and _can_copy_next(slots, slot, chosen):
            continue
        chosen.append(int(slot))
        longest = padded
    return np.sort(behind[np.isin(rows, chosen)[same]])


def _can_copy_next(slots: Slots, slot: int, chosen: list[int]) -> bool:
    """Return True if this step computes KV that the slot can copy in the next step."""
    if not chosen:
        return False
    common = slots.common(np.array([slot]), np.array(chosen))
    return int(common.max()) >= slots.cached[slot] + MIN_SHARED
