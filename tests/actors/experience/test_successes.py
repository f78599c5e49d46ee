"""Groups that failed throughout learn from solved ones: similar ones only, bounded, durable."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contributions import LOST, WON, Told, contribution, episode, steps
from hypothesis import given
from hypothesis import strategies as st

from actors.experience import successes
from actors.experience.contrast import contrast_items, departures
from actors.experience.embed import HashEmbedder
from actors.experience.experience_service import ExperienceService, open_pool
from actors.experience.pool import ExperiencePool
from actors.experience.pool_file import FILE, Store
from actors.experience.successes import EPISODES, SolvedGroup, SuccessMemory
from actors.experience.templates import contrast
from evolver_async.config import ExperienceConfig
from evolver_async.wire import messages
from evolver_async.wire.transcripts import Transcript

TASK = "walk over the ice to the goal"
OTHER = "pull the better of two arms"
CONFIG = ExperienceConfig(kind="contrast", similarity=0.8)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Callable[[], SuccessMemory]]:
    """Opens the memory of this test's directory, as often as wanted."""
    stores: list[Store] = []

    def memory() -> SuccessMemory:
        if stores:
            stores.pop().close()
        stores.append(Store(tmp_path / FILE))
        return SuccessMemory(stores[-1], HashEmbedder(64))

    yield memory
    stores.pop().close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ExperienceService]:
    made = ExperienceService(open_pool(CONFIG, tmp_path), CONFIG, Told())
    yield made
    made.close()


def contents(pool: ExperiencePool) -> list[str]:
    return sorted(entry.content for entry in pool.entries.values())


# ---- memory


def test_the_nearest_come_first_and_of_equally_near_ones_the_newest(
    memory: Callable[[], SuccessMemory],
) -> None:
    found = memory()
    for query in (f"{TASK} today", OTHER, TASK, f"{TASK} Today"):
        found.remember("a", query, [WON])
    near = [group.query for group in found.similar(TASK, 0.8)]
    assert near == [TASK, f"{TASK} Today", f"{TASK} today"]
    assert [group.query for group in found.similar(TASK, 1.0)] == [TASK]
    assert found.similar("send an invoice", 0.8) == []


def test_a_query_has_its_newest_solved_group_and_the_oldest_are_forgotten(
    memory: Callable[[], SuccessMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(successes, "CAPACITY", 3)
    found = memory()
    for source, query in (("a", "one"), ("a", "two"), ("a", "three"), ("b", "one"), ("a", "four")):
        found.remember(source, query, [WON, LOST])
    for known in (found, memory()):
        assert len(known) == 3
        assert [group.source for group in known.similar("one", 1.0)] == ["b"]
        assert known.similar("two", 1.0) == []


def test_only_successes_are_remembered_the_best_first(memory: Callable[[], SuccessMemory]) -> None:
    found = memory()
    found.remember("a", TASK, [LOST])
    assert len(found) == 0
    found.remember("a", TASK, [LOST, *(replaced(n, n / 10) for n in range(EPISODES + 2)), LOST])
    (group,) = found.similar(TASK, 1.0)
    assert [one.reward for one in group.episodes] == [0.5, 0.4, 0.3, 0.2]
    assert all(one.success for one in group.episodes)


def replaced(number: int, reward: float) -> Transcript:
    made = episode("a=left", success=True, number=number)
    return Transcript(
        trajectory_id=made.trajectory_id,
        reward=reward,
        success=True,
        experience_ids=[],
        turns=made.turns,
    )


@given(st.lists(st.tuples(st.sampled_from([TASK, OTHER, "one", "two"]), st.booleans())))
def test_a_restart_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, groups: list[tuple[str, bool]]
) -> None:
    path = tmp_path_factory.mktemp("memory") / FILE
    store = Store(path)
    memory = SuccessMemory(store, HashEmbedder(64))
    for number, (query, success) in enumerate(groups):
        memory.remember(f"actor-{number}", query, [episode("a=left", success=success)])
    before = [(one.source, one.query, one.episodes) for one in memory.similar(TASK, 0.0)]
    store.close()
    store = Store(path)
    again = SuccessMemory(store, HashEmbedder(64)).similar(TASK, 0.0)
    assert [(one.source, one.query, one.episodes) for one in again] == before
    assert {query for _, query, _ in before} <= {query for query, success in groups if success}
    store.close()


# ---- contrast


ways = st.lists(steps, min_size=1, max_size=4)


def played(ways: list[list[tuple[str, str]]], *, success: bool) -> list[Transcript]:
    return [
        episode(*(f"{state}={action}" for state, action in way), success=success, number=number)
        for number, way in enumerate(ways)
    ]


@given(ways, ways)
def test_a_solved_group_teaches_as_if_it_had_been_of_the_group(
    won: list[list[tuple[str, str]]], lost: list[list[tuple[str, str]]]
) -> None:
    good, bad = played(won, success=True), played(lost, success=False)
    together = contrast_items(TASK, [*good, *bad])
    apart = contrast_items(TASK, bad, [SolvedGroup("teacher", OTHER, good)])
    assert [(i.when_to_use, i.content, i.state) for i in apart] == [
        (i.when_to_use, i.content, i.state) for i in together
    ]
    assert {item.teacher for item in apart} <= {"teacher"}
    assert {item.teacher for item in together} <= {""}


def test_the_nearest_group_that_knows_a_state_tells_its_action() -> None:
    near = SolvedGroup("near", TASK, [episode("b=down", success=True)])
    far = SolvedGroup("far", OTHER, [episode("b=up", "c=up", success=True)])
    failed = [
        episode("b=left", success=False),
        episode("b=left", "c=left", success=False, number=1),
    ]
    items = contrast_items(TASK, failed, [near, far])
    assert [(item.content, item.teacher) for item in items] == [
        (contrast("b", "down", "left"), "near"),
        (contrast("c", "up", "left"), "far"),
    ]


def test_a_group_with_a_success_of_its_own_needs_no_other() -> None:
    far = SolvedGroup("far", OTHER, [episode("b=up", "c=up", success=True)])
    lost = episode("a=right", "b=left", "c=left", success=False, number=1)
    (item,) = contrast_items(TASK, [WON, lost], [far])
    assert (item.content, item.teacher) == (contrast("b", "down", "left"), "")


def test_departures_count_the_last_action_of_each_success() -> None:
    again = episode("a=left", "b=up", "a=right", "c=", success=True)
    found = departures([again, WON])
    assert found == {"a": {"right": 2}, "b": {"up": 1, "down": 1}}


# ---- service


def test_a_failed_group_learns_from_a_similar_one_alone(service: ExperienceService) -> None:
    service.handle("actor-0", contribution(WON, query=OTHER), 0.0)
    service.handle("actor-1", contribution(LOST, query=TASK), 0.0)
    assert contents(service.pool) == []
    service.handle("actor-0", contribution(replaced(7, 1.0), query=f"{TASK} now"), 0.0)
    lost = episode("a=up", success=False, number=8)
    service.handle("actor-1", contribution(lost, query=TASK), 0.0)
    (entry,) = service.pool.entries.values()
    assert (entry.content, entry.when_to_use) == (contrast("a", "left", "up"), TASK)
    assert (entry.source, entry.teacher) == ("actor-1", "actor-0")
    assert service.counters()["experience/taught"] == 1
    assert service.counters()["experience/solved"] == 2


def test_a_success_of_the_test_split_teaches_nothing(service: ExperienceService) -> None:
    service.handle("actor-0", contribution(WON, query=TASK, split="test"), 0.0)
    service.handle("actor-1", contribution(LOST, query=TASK), 0.0)
    assert contents(service.pool) == [] and service.counters()["experience/solved"] == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_a_purged_teacher_leaves_neither_successes_nor_what_they_taught(
    tmp_path: Path, restarts: bool
) -> None:
    service = ExperienceService(open_pool(CONFIG, tmp_path), CONFIG, Told())
    service.handle("evil", contribution(episode("b=poison", success=True), query=TASK), 0.0)
    service.handle("good", contribution(LOST, query=TASK), 0.0)
    assert contents(service.pool) == [contrast("b", "poison", "left")]
    if restarts:
        service.close()
        service = ExperienceService(open_pool(CONFIG, tmp_path), CONFIG, Told())
    (reply,) = service.handle("purge-1", messages.Purge(source="evil"), 0.0)
    assert isinstance(reply, messages.Purged) and reply.count == 1
    later = episode("a=right", "b=up", success=False, number=9)
    service.handle("good", contribution(later, query=TASK), 0.0)
    assert contents(service.pool) == []
    service.commit()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(b"poison" in content for content in files)
    service.close()
