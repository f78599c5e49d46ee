"""Vector index: exact search, with the cache, with removal, on a CPU and beside a GPU's copy."""

import faiss
import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.experience import gpu_vectors
from actors.experience import index as indexes
from actors.experience.index import Near, VectorIndex
from actors.experience.pool_file import ExperienceEntry
from actors.experience.vectors import VectorTable


def entry(number: int, vector: np.ndarray) -> ExperienceEntry:
    """An entry with this number; its texts say nothing."""
    return ExperienceEntry(
        when_to_use="",
        content="",
        state="",
        score=1.0,
        source="",
        trajectories=[],
        created=0,
        when_vector=vector,
        content_vector=vector,
        id=number,
    )


def numbers(near: Near) -> list[tuple[int, float]]:
    return [(entry.id, product) for place, product in near for entry in place]


def nearest(index: VectorIndex, query: np.ndarray, count: int) -> list[tuple[int, float]]:
    (found,) = index.search(query[None], count)
    return numbers(found)


def slow_search(vectors: np.ndarray, query: np.ndarray, count: int) -> list[float]:
    return sorted((vectors @ query).tolist(), reverse=True)[:count]


def products(found: list[tuple[int, float]]) -> list[float]:
    return [product for _, product in found]


def pretend_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let faiss search a copy as on a GPU; only faiss for CUDA can make a real one."""
    patch.setattr(faiss, "get_num_gpus", lambda: 1)
    patch.setattr(gpu_vectors, "_gpu", lambda: None)
    patch.setattr(faiss, "index_cpu_to_gpu", lambda gpu, device, flat: flat, raising=False)
    patch.setattr(gpu_vectors, "MAX_CHANGED", 3)


@pytest.mark.parametrize("on_gpu", [False, True])
@settings(max_examples=examples(40))
@given(
    flips=st.lists(st.integers(0, 30), max_size=60),
    count=st.integers(1, 8),
    least=st.sampled_from([-9.0, 0.0, 1.0, 3.0]),
)
def test_the_index_finds_what_a_slow_search_finds(
    on_gpu: bool, flips: list[int], count: int, least: float
) -> None:
    """Each number in `flips` is added, or removed where it is there; the oracle is a loop."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(31, 8)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "FIRST", 2)
        patch.setattr(indexes, "KEPT", 4)
        patch.setattr(indexes, "MAX_CHANGES", 3)
        if on_gpu:
            pretend_gpu(patch)
        index, there = VectorIndex(8), set()
        assert (type(index._table) is VectorTable) != on_gpu
        for flip, number in enumerate(flips):
            if number in there:
                index.remove(entry(number, vectors[number]))
            else:
                index.add(entry(number, vectors[number]))
            there ^= {number}
            for query in (vectors[flip % 3] + 0.1, vectors[(number * 7 + 3) % 31] + 0.1):
                far = {number: -float(vectors[number] @ query) for number in there}
                slow = [n for n in sorted(there, key=far.__getitem__) if -far[n] >= least][:count]
                (found,) = index.search(query[None], count, least)
                assert [name for name, _ in numbers(found)] == slow
        assert len(index._table) <= 31, "rows that are left are used again"


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32 - 1), st.integers(1, 150))
def test_many_questions_at_once_have_the_answers_of_each(seed: int, count: int) -> None:
    """Exactly: among more places than are sorted, with a cache that knows only some of them."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(4000, 4)).astype(np.float32)
    questions = rng.normal(size=(70, 4)).astype(np.float32)
    index = VectorIndex(4)
    for size in (10, 3000, 4000):
        for number in range(len(index._places), size):
            index.add(entry(number, vectors[number]))
        found = list(map(numbers, index.search(questions, count)))
        for near, question in zip(found, questions, strict=True):
            np.testing.assert_allclose(
                products(near), slow_search(vectors[:size], question, count), rtol=1e-5, atol=1e-6
            )
            assert all(
                product == pytest.approx(float(vectors[number] @ question), rel=1e-5, abs=1e-6)
                for number, product in near
            )


def test_entries_with_the_same_vector_cost_one_place_and_none_is_preferred() -> None:
    index = VectorIndex(2)
    one, other = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    for number in range(100):
        index.add(entry(number, one if number % 2 else other))
    assert len(index._table) == 2
    assert sorted(nearest(index, one, 3)) == [(number, 1.0) for number in range(1, 100, 2)]
    for number in range(1, 100, 2):
        index.remove(entry(number, one))
    assert sorted(nearest(index, one, 3)) == [(number, 0.0) for number in range(0, 100, 2)]
    index.add(entry(7, one))
    assert nearest(index, one, 1) == [(7, 1.0)] and len(index._table) == 2


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 3)), max_size=40))
def test_entries_at_one_place_are_in_order_of_their_use(changes: list[tuple[int, int]]) -> None:
    """-1 adds or removes an entry; another number is the utility of four uses."""
    index, there, vector = VectorIndex(2), dict[int, ExperienceEntry](), np.ones(2, np.float32)
    for number, utility in changes:
        if number not in there:
            index.add(there.setdefault(number, entry(number, vector)))
        elif utility < 0:
            index.remove(there.pop(number))
        else:
            with index.reranked(one := there[number]):
                one.uses, one.utility = 4, float(utility)
                one.rate()
        order = sorted(there.values(), key=lambda one: (one.worth, one.id))
        assert [number for number, _ in nearest(index, vector, 1)] == [one.id for one in order]


def searches(patch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of questions in each search of the whole table from now on."""
    counted: list[int] = []
    search = VectorTable.nearest

    def counting(table: VectorTable, vectors: np.ndarray, *rest: float) -> object:
        counted.append(len(vectors))
        return search(table, vectors, *rest)  # pyright: ignore

    patch.setattr(VectorTable, "nearest", counting)
    return counted


def test_a_question_in_the_cache_is_compared_with_new_places_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    index, question = VectorIndex(4), np.ones(4, np.float32)
    vectors = rng.normal(size=(500, 4)).astype(np.float32)
    for number in range(400):
        index.add(entry(number, vectors[number]))
    counted = searches(monkeypatch)
    for number in range(400, 500):
        found = products(nearest(index, question, 5))
        np.testing.assert_allclose(found, slow_search(vectors[:number], question, 5), rtol=1e-5)
        index.add(entry(number, vectors[number]))
    assert counted == [1]


def test_questions_that_need_more_places_are_searched_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One search of the first rows, one more as soon as a question needs more."""
    rng = np.random.default_rng(0)
    index = VectorIndex(8)
    for number, vector in enumerate(rng.normal(size=(2000, 8)).astype(np.float32)):
        index.add(entry(number, vector))
    counted = searches(monkeypatch)
    found = index.search(rng.normal(size=(60, 8)).astype(np.float32), 100)
    assert all(len(numbers(near)) == 100 for near in found)
    assert counted == [60, 60]


def test_a_gpu_that_cannot_be_used_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", full, raising=False)
    index = VectorIndex(2)
    index.add(entry(7, np.ones(2, np.float32)))
    assert nearest(index, np.ones(2, np.float32), 1) == [(7, 2.0)]
    assert "without the GPU: out of memory" in caplog.text
