"""Table of vectors that faiss searches on a GPU."""

import functools
import logging
from typing import Any

import faiss
import numpy as np

from actors.experience.vectors import NearRows, VectorTable, by_question

MAX_CHANGED = 256  # rows that differ from the copy before it is made again
GPU_BYTES = 64 << 20

log = logging.getLogger(__name__)


def vector_table(dimensions: int) -> VectorTable:
    """Make a table, on a GPU if faiss finds one that has memory left."""
    if faiss.get_num_gpus() == 0:
        return VectorTable(dimensions)
    try:
        return GpuVectorTable(dimensions)
    except RuntimeError as error:
        log.warning("faiss searches the experience without the GPU: %s", error)
        return VectorTable(dimensions)


class GpuVectorTable(VectorTable):
    """Table with a copy on a GPU; rows that have changed since are compared on the CPU."""

    def __init__(self, dimensions: int) -> None:
        super().__init__(dimensions)
        self._copy: Any = faiss.index_cpu_to_gpu(_gpu(), 0, faiss.IndexFlatIP(dimensions))
        self._rows_C = np.zeros(0, np.int64)  # of the vectors in the copy
        self._copied = 0  # rows that were copied, or were free then
        self._changed: set[int] = set()  # of the copied rows

    def put(self, vector: np.ndarray) -> int:
        row = super().put(vector)
        if row < self._copied:
            self._changed.add(row)
        return row

    def free(self, row: int) -> None:
        super().free(row)
        if row < self._copied:
            self._changed.add(row)

    def nearest(self, vectors_QD: np.ndarray, count: int, least: float) -> list[NearRows]:
        self._follow()
        products_QK, places_QK = self._copy.search(vectors_QD, count + len(self._changed))
        last_Q = np.where(places_QK[:, -1] < 0, -np.inf, products_QK[:, -1])
        bounds_Q = np.maximum(last_Q, least)
        rows_QK = np.append(self._rows_C, -1)[places_QK]
        rows_QK[np.isin(rows_QK, [*self._changed])] = -1
        changed = sorted(self._changed - self._free)
        products_QC = self.products(changed, vectors_QD).T
        rows_QC = np.broadcast_to(np.array(changed, np.int64), products_QC.shape)
        rows_QA = np.concatenate([rows_QK, rows_QC], 1)
        products_QA = np.concatenate([products_QK, products_QC], 1)
        found_P = np.nonzero((rows_QA >= 0) & (products_QA >= bounds_Q[:, None]))
        return by_question(rows_QA[found_P], found_P[0], products_QA[found_P], bounds_Q, 2 * count)

    def _follow(self) -> None:
        """Copy the new rows; copy all again if too many have changed."""
        if len(self._changed) > MAX_CHANGED:
            self._copy.reset()
            self._rows_C, self._copied = self._rows_C[:0], 0
            self._changed.clear()
        rows_N = np.setdiff1d(np.arange(self._copied, len(self)), [*self._free])
        if len(rows_N) > 0:
            self._copy.add(self._rows()[rows_N])
        self._rows_C = np.concatenate([self._rows_C, rows_N])
        self._copied = len(self)


@functools.cache
def _gpu() -> Any:
    """Reserve GPU memory for faiss, once per process; little, as an engine may share the GPU."""
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(GPU_BYTES)
    return resources
