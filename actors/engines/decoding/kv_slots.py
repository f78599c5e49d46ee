"""KV slots: one row of keys and values per session, written and read in place by the model.

A slot stores the tokens of its KV, so that a later turn or another member of the group can continue
from the longest common prefix. `torch_engine` assigns slots to requests.

If KV is kept over weight updates, a session uses its own and what others have computed since it
began, never older KV: that of a new session is all of the weights that it starts with, which makes
evaluations exact.

`S` slots, `B` rows of one forward, `Q` new tokens a row (padded), `T` columns of context attended.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig

from evolver_async.model.row_checks import other_layers

COLUMNS = 32  # attended lengths are rounded up to multiples of this
HIDDEN, SEEN = np.float32(-np.inf), np.float32(0)  # in a mask that is added
COMPARED = 1 << 22  # tokens of other slots that slots are compared with at once


class Slots(Cache):
    """KV of all slots as a transformers cache, with its tokens.

    tokens int32[S, max_length]: context of each slot; total[S]: its length; cached[S]: number of
    its tokens with valid KV. A layer has a pool [S * (max_length + 1), 2, heads, head size], keys
    before values; padding is written to the last column of a slot, which is never read.

    `keep`: KV stays valid over weight updates. epoch: number of updates so far; epochs int32[S,
    max_length + 1]: the least epoch that the KV of the slot up to each token depends on; oldest[S]:
    the least epoch whose KV the slot may use.
    """

    def __init__(
        self, slots: int, max_length: int, dtype: torch.dtype, device: torch.device, keep: bool
    ) -> None:
        super().__init__(layers=[])
        self.tokens = np.zeros((slots, max_length), np.int32)
        self.total = np.zeros(slots, np.int64)
        self.cached = np.zeros(slots, np.int64)
        self._keep = keep
        self.epoch = 0
        self.epochs = np.zeros((slots, max_length + 1), np.int32)
        self.oldest = np.zeros(slots, np.int32)
        self._distinct = np.zeros(slots, bool)  # slots of which no two compute the same
        self._dtype, self._device = dtype, device
        self._pools: list[Tensor] = []
        self._write_N = torch.zeros(0, dtype=torch.long)  # places of the batch's tokens in a pool
        self._rows: slice | Tensor = slice(0)  # what the batch reads
        self._columns = 0
        self._views: list[tuple[Tensor, Tensor]] = []  # of each layer, if adjacent rows are read

    @property
    def max_length(self) -> int:
        return self.tokens.shape[1]

    def assign(self, slot: int, context: np.ndarray) -> int:
        """Set the slot's tokens to `context`; return the number of those with valid KV."""
        known = min(int(self.cached[slot]), len(context) - 1)
        differs = np.flatnonzero(self.tokens[slot, :known] != context[:known])
        known = int(differs[0]) if len(differs) else known
        known = int(self._usable(np.array([slot]), np.array([slot]), known)[0, 0])
        self.tokens[slot, known : len(context)] = context[known:]
        self.total[slot], self.cached[slot] = len(context), known
        self._distinct[slot] = False
        return known

    def append(self, slots: np.ndarray, tokens: list[int]) -> None:
        """Add a sampled token to each slot, whose KV the next forward writes."""
        self.tokens[slots, self.total[slots]] = tokens
        self.total[slots] += 1

    def common(self, slots_K: np.ndarray, others_O: np.ndarray) -> np.ndarray:
        """Return the lengths [K, O] of the prefixes that slots' tokens, except the last ones, share
        with other slots."""
        length_K1 = self.total[slots_K, None] - 1
        width = int(length_K1.max())
        differs_KOT = self.tokens[slots_K, None, :width] != self.tokens[others_O, :width]
        first_KO = np.where(differs_KOT.any(2), differs_KOT.argmax(2), width)
        return np.minimum(np.minimum(first_KO, length_K1), self.total[others_O])

    def borrow(self, slots: np.ndarray) -> int:
        """Copy KV to each slot from that with the longest common prefix; return the number of
        tokens."""
        size = max(1, COMPARED // (self.tokens.size or 1))
        return sum(self._borrow(slots[i : i + size]) for i in range(0, len(slots), size))

    def _borrow(self, slots_K: np.ndarray) -> int:
        everyone = np.arange(len(self.total))
        shared_KS = np.minimum(self.common(slots_K, everyone), self.cached)
        usable_KS = self._usable(slots_K, everyone, int(shared_KS.max()))
        shared_KS = np.minimum(shared_KS, usable_KS)
        source_K, new_K = shared_KS.argmax(1), shared_KS.max(1)
        count_K = np.maximum(new_K - self.cached[slots_K], 0)
        if not (total := int(count_K.sum())):
            return 0
        self._copy(source_K, slots_K, new_K - count_K, count_K)
        self.cached[slots_K] += count_K
        return total

    def _copy(
        self, from_K: np.ndarray, to_K: np.ndarray, first_K: np.ndarray, count_K: np.ndarray
    ) -> None:
        """Copy the KV of `count_K` tokens from the columns `first_K` on to other slots."""
        ends_K = count_K.cumsum()
        columns = np.arange(int(ends_K[-1])) + np.repeat(first_K + count_K - ends_K, count_K)
        read, written = np.repeat(from_K, count_K), np.repeat(to_K, count_K)
        if self._keep:
            oldest = np.repeat(self._oldest_before(to_K, first_K), count_K)
            self.epochs[written, columns] = np.minimum(self.epochs[read, columns], oldest)
        read_index, write_index = (
            torch.from_numpy(rows * (self.max_length + 1) + columns).to(self._device)
            for rows in (read, written)
        )
        for pool in self._pools:
            pool.index_copy_(0, write_index, pool.index_select(0, read_index))

    def distinct(self, slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the slots whose next `counts` tokens have to be computed, and for
        every slot the one among them that computes the same.

        The same is what reads the same tokens over KV of the present weights alone. Slots that were
        distinct in a decoding step stay so while all of them decode.
        """
        if self._distinct[slots].all():
            everyone = np.arange(len(slots))
            return everyone, everyone
        known: dict[tuple[int, bytes, int], int] = {}
        firsts, same_B = list[int](), np.empty(len(slots), np.int64)
        cached_B, mixed_B = self.cached[slots], np.full(len(slots), -1)
        if self._keep:
            older_B = self._oldest_before(slots, cached_B) < self.epoch
            mixed_B = np.where(older_B, slots, mixed_B)
        sizes = zip(*(one.tolist() for one in (slots, counts, cached_B, mixed_B)), strict=True)
        for place, (slot, count, cached, mixed) in enumerate(sizes):
            content = count, self.tokens[slot, : cached + count].tobytes(), mixed
            same_B[place] = known.setdefault(content, len(firsts))
            if same_B[place] == len(firsts):
                firsts.append(place)
        if counts.max() == 1:  # whole contexts were compared
            self._distinct[:] = False
            self._distinct[slots[firsts]] = True
        return np.array(firsts), same_B

    def write(
        self, slots: np.ndarray, counts: np.ndarray, firsts: np.ndarray, same_B: np.ndarray
    ) -> None:
        """Note the KV of the slots' next `counts` tokens, which the first of `distinct` slots have
        computed; the others copy it."""
        if len(firsts) < len(slots):
            from_B = slots[firsts][same_B]
            copies = np.flatnonzero(from_B != slots)
            to_K = slots[copies]
            self._copy(from_B[copies], to_K, self.cached[to_K], counts[copies])
        self.cached[slots] += counts

    def _usable(self, slots_K: np.ndarray, others_O: np.ndarray, length: int) -> np.ndarray:
        """Return how many [K, O] of the first `length` tokens of other slots have KV that slots may
        use."""
        if not self._keep or not length:  # older KV is invalid, or there is none
            return np.full((len(slots_K), len(others_O)), length)
        stale_KOT = self.epochs[others_O, :length] < self.oldest[slots_K, None, None]
        return np.where(stale_KOT.any(2), stale_KOT.argmax(2), length)

    def _oldest_before(self, slots: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the least epoch of the KV in the slots before these columns."""
        return np.where(columns > 0, self.epochs[slots, columns - 1], self.epoch)

    def stale(self, slots: np.ndarray) -> int:
        """Count the slots that attend to KV of an earlier epoch."""
        if not self._keep:
            return 0
        length = int(self.cached[slots].max())
        older = self.epochs[slots, :length] < self.epoch
        return int((older & (np.arange(length) < self.cached[slots, None])).any(1).sum())

    def start_epoch(self) -> None:
        """Note a weight update; invalidate all KV unless it is kept."""
        self.epoch += 1
        if not self._keep:
            self.forget()

    def forget(self) -> None:
        """Mark all KV as invalid; the tokens stay, as running generations continue."""
        self.cached[:] = 0
        self._distinct[:] = False  # computed anew, a context can catch up with one that it begins

    def erase(self) -> None:
        """Invalidate and overwrite all KV: a masked NaN still makes attention NaN."""
        self.forget()
        for pool in self._pools:
            pool.zero_()

    def batch(
        self, slots: np.ndarray, counts: np.ndarray
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the model's inputs for the next `counts` tokens of each slot (ascending), and the
        places of the slots' last tokens among all B * Q; None if there are no others.

        Adjacent slots are read in place, together with idle rows between them; scattered slots are
        gathered.
        """
        low, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
        longest = int(counts.max())
        rows, index, new = slots, np.arange(len(slots)), counts
        adjacent = span <= (len(slots) * 1.5 if longest == 1 else len(slots))
        if adjacent and span > len(slots):
            rows, index = np.arange(low, low + span), slots - low
            new = np.zeros(span, np.int64)
            new[index] = counts
        offsets_Q = np.arange(longest)
        positions_BQ = columns_BQ = self.cached[rows, None] + offsets_Q
        last = None
        if longest > 1 or len(rows) > len(slots):
            last = self._on_device(index * longest + counts - 1)
            columns_BQ = np.where(offsets_Q < new[:, None], positions_BQ, self.max_length)
            positions_BQ = np.minimum(positions_BQ, self.max_length - 1)
        if self._keep:
            oldest_B1 = self._oldest_before(rows, self.cached[rows])[:, None]
            self.epochs[rows[:, None], columns_BQ] = oldest_B1
        write_BQ = rows[:, None] * (self.max_length + 1) + columns_BQ
        self._write_N = self._on_device(write_BQ.ravel())
        needed = int((self.cached[slots] + counts).max())
        columns = min(-(-needed // COLUMNS) * COLUMNS, self.max_length)
        self._attend_to(slice(low, low + span) if adjacent else self._on_device(rows), columns)
        ids_BQ = self.tokens[rows[:, None], positions_BQ].astype(np.int64)
        hidden_B1QT = np.arange(columns) > positions_BQ[:, None, :, None]
        mask_B1QT = self._on_device(np.where(hidden_B1QT, HIDDEN, SEEN))
        inputs = {
            "input_ids": self._on_device(ids_BQ),
            "position_ids": self._on_device(positions_BQ),
            "attention_mask": mask_B1QT.to(self._dtype),
        }
        return inputs, last

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _attend_to(self, rows: slice | Tensor, columns: int) -> None:
        """Choose the rows and the number of columns that the next forward attends to."""
        if isinstance(rows, Tensor) or rows != self._rows or columns != self._columns:
            self._views.clear()
        self._rows, self._columns = rows, columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return all to attend to; called by the model."""
        states_BHQD = torch.cat([key_states, value_states], 1)
        states_NHD = states_BHQD.transpose(1, 2).flatten(0, 1)
        return self.store(states_NHD.unflatten(1, (2, -1)), layer_idx)

    def store(self, states_N2HD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store the batch's new keys and values.

        Return all keys and values [B, heads, T, head size] to attend to.
        """
        if layer == len(self._pools):
            # zeros, because masked values must be finite too
            places = len(self.total) * (self.max_length + 1)
            self._pools.append(states_N2HD.new_zeros(places, *states_N2HD.shape[1:]))
        pool = self._pools[layer]
        pool.index_copy_(0, self._write_N, states_N2HD)
        if layer < len(self._views):
            return self._views[layer]
        read = pool.unflatten(0, (len(self.total), -1))
        if isinstance(self._rows, Tensor):
            gathered = read[:, : self._columns].index_select(0, self._rows)
            return _keys_and_values(gathered)
        self._views.append(_keys_and_values(read[self._rows, : self._columns]))
        return self._views[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns


def _keys_and_values(read_BT2HD: Tensor) -> tuple[Tensor, Tensor]:
    keys_BHTD, values_BHTD = read_BT2HD.permute(2, 0, 3, 1, 4).unbind()
    return keys_BHTD, values_BHTD


def check_attention(config: PretrainedConfig, max_length: int) -> None:
    """Raise ValueError unless every layer attends to the whole context of `max_length` tokens."""
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < max_length:
        raise ValueError(f"the model's sliding window {window} is shorter than {max_length} tokens")
    if kinds := other_layers(config):
        raise ValueError(f"it has layers of type {', '.join(sorted(kinds))}")


def check_model(config: PretrainedConfig, max_length: int) -> None:
    """Raise ValueError as `check_attention`, or if the model has fewer positions."""
    check_attention(config, max_length)
    most = config.max_position_embeddings
    if most < max_length:
        raise ValueError(f"the model's {most} positions are fewer than {max_length}")
