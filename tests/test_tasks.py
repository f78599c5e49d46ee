"""The stream of tasks: keyed, complete, patient with slow tasks only so far."""

import collections
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.buffer.tasks import Cursor, Source, Tasks, held_out_task
from evolver_async.schema import Task

ENDLESS = Source(env="maze", params={"size": 3}, train=0)


def finite(count: int) -> Source:
    return Source(env="maze", params={}, train=count)


def draw(tasks: Tasks) -> Task:
    queued = tasks.peek()
    assert queued is not None
    tasks.take(queued.task)
    return queued.task


def synthetic(number: int) -> Task:
    return Task(
        task_id=f"made/{number}", env="maze", split="train", map_seed=number, origin="synthetic"
    )


@given(st.integers(1, 20), st.integers(0, 5))
def test_every_pass_meets_every_task_once(count, seed):
    tasks = Tasks(seed, finite(count))
    for _ in range(3):
        assert sorted(draw(tasks).map_seed for _ in range(count)) == list(range(count))


def test_passes_are_shuffled_by_the_seed_alone():
    def order(seed: int) -> list[int]:
        tasks = Tasks(seed, finite(20))
        return [draw(tasks).map_seed for _ in range(40)]

    assert order(1) == order(1) != order(2)
    assert order(1)[:20] != order(1)[20:]


def test_an_endless_source_never_repeats():
    tasks = Tasks(0, ENDLESS)
    assert [draw(tasks).task_id for _ in range(3)] == [f"maze/train/{n}" for n in range(3)]


def test_held_out_tasks_are_of_the_test_split():
    task = held_out_task(ENDLESS, 4)
    assert (task.task_id, task.split, task.map_seed) == ("maze/test/4", "test", 4)


def test_a_slow_task_is_issued_again_then_with_patience_then_never():
    tasks = Tasks(0, ENDLESS)
    slow = draw(tasks)
    assert tasks.requeue(slow) == "again"
    assert tasks.peek() is not None and not tasks.peek().wait
    assert draw(tasks) == slow
    assert tasks.requeue(slow) == "wait"
    assert tasks.peek().wait
    assert draw(tasks) == slow
    assert tasks.requeue(slow) == "too slow"
    assert tasks.cursor.quarantined == {slow.task_id: "too slow"}
    assert draw(tasks).task_id == "maze/train/1"


def test_a_completed_group_clears_the_tasks_age():
    tasks = Tasks(0, finite(3))
    task = draw(tasks)
    tasks.requeue(task)
    tasks.completed(task, 0.5)
    tasks.completed(task, 1.0)
    tasks.completed(task, None)
    assert tasks.requeue(task) == "again"
    assert tasks.cursor.success == {task.task_id: 1.0}


@pytest.mark.parametrize("solved, failed", [(0.0, 0.5), (0.25, 1.0), (1.0, 0.0)])
def test_a_pass_meets_what_is_solved_or_failed_as_often_as_it_is_told(solved, failed):
    tasks = Tasks(1, Source(env="maze", params={}, train=3, solved=solved, failed=failed))
    for number, success in enumerate((1.0, 0.0, 0.375)):
        tasks.cursor.success[f"maze/train/{number}"] = success
    met = collections.Counter()
    while tasks.cursor.position < 3000:
        met[draw(tasks).map_seed] += 1
    for number, chance in enumerate((solved, failed, 1.0)):
        assert met[number] == pytest.approx(1000 * chance, abs=5 * math.sqrt(1000) * 0.5)


def test_where_no_task_is_worth_it_the_next_one_is_met_all_the_same():
    tasks = Tasks(1, Source(env="maze", params={}, train=4, solved=0.0, failed=0.0))
    for number in range(4):
        tasks.cursor.success[f"maze/train/{number}"] = float(number % 2)
    assert sorted(draw(tasks).map_seed for _ in range(4)) == [0, 1, 2, 3]


def test_quarantined_tasks_are_skipped_until_none_is_left():
    tasks = Tasks(0, finite(3))
    tasks.quarantine("maze/train/1", "environment")
    assert {draw(tasks).map_seed for _ in range(8)} == {0, 2}
    for number in (0, 2):
        tasks.quarantine(f"maze/train/{number}", "environment")
    assert tasks.peek() is None


def test_offered_tasks_are_issued_once_however_often_they_are_offered():
    tasks = Tasks(0, ENDLESS)
    tasks.offer([synthetic(0), synthetic(1)])
    tasks.offer([synthetic(0)])
    assert [draw(tasks).task_id for _ in range(3)] == ["made/0", "made/1", "maze/train/0"]
    tasks.offer([synthetic(0)])
    assert draw(tasks).task_id == "maze/train/1"


def test_a_new_stage_drops_what_was_queued_again_and_keeps_what_was_offered():
    tasks = Tasks(0, ENDLESS)
    tasks.requeue(draw(tasks))
    tasks.offer([synthetic(0)])
    tasks.switch(finite(5))
    assert draw(tasks).task_id == "made/0"
    assert tasks.peek().task.map_seed in range(5)


@given(st.integers(0, 30), st.integers(0, 6))
def test_the_stream_continues_after_a_restart(drawn, count):
    tasks = Tasks(3, finite(count))
    for index in range(drawn):
        if tasks.peek() is not None:
            task = draw(tasks)
            if index % 4 == 0:
                tasks.requeue(task)
    restarted = Tasks(3, finite(count))
    restarted.cursor = msgspec.msgpack.decode(msgspec.msgpack.encode(tasks.cursor), type=Cursor)
    for _ in range(10):
        left, right = tasks.peek(), restarted.peek()
        assert left == right
        if left is not None and right is not None:
            tasks.take(left.task)
            restarted.take(right.task)
