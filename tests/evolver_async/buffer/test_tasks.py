"""The stream of tasks: keyed, complete, patient with slow tasks only so far."""

import collections
import json
import math
from pathlib import Path

import msgspec
import pytest
from buffer_world import synthetic
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.buffer.stages import source_of
from evolver_async.buffer.tasks.row_files import rows_of
from evolver_async.buffer.tasks.rows import given_tasks
from evolver_async.buffer.tasks.stream import Cursor, Queued, TaskStream, Walk
from evolver_async.buffer.tasks.task_source import TaskSource, held_out_task
from evolver_async.config import Config, TasksConfig
from evolver_async.config.load import load, stage_config
from evolver_async.config.sections.run import EvalConfig
from evolver_async.schema import Task

ENDLESS = TaskSource(env="maze", params={"size": 3}, train=0)


def finite(count: int) -> TaskSource:
    return TaskSource(env="maze", params={}, train=count)


def draw(tasks: TaskStream, share: float = 0.0) -> Task:
    queued = tasks.peek(share)
    assert queued is not None
    tasks.take(queued.task)
    return queued.task


def numbered(number: int) -> Task:
    return Task(task_id=f"maze/train/{number}", env="maze", split="train", map_seed=number)


def made(*numbers: int, env: str = "maze") -> list[Task]:
    return [synthetic(number, env) for number in numbers]


@given(st.integers(1, 20), st.integers(0, 5))
def test_every_pass_meets_every_task_once(count, seed):
    tasks = TaskStream(seed, finite(count))
    for _ in range(3):
        assert sorted(draw(tasks).map_seed for _ in range(count)) == list(range(count))


def test_passes_are_shuffled_by_the_seed_alone():
    def order(seed: int) -> list[int]:
        tasks = TaskStream(seed, finite(20))
        return [draw(tasks).map_seed for _ in range(40)]

    assert order(1) == order(1) != order(2)
    assert order(1)[:20] != order(1)[20:]


def test_an_endless_source_never_repeats():
    tasks = TaskStream(0, ENDLESS)
    assert [draw(tasks).task_id for _ in range(3)] == [f"maze/train/{n}" for n in range(3)]


def test_held_out_tasks_are_of_the_split_that_decides():
    task = held_out_task(ENDLESS, 4)
    assert (task.task_id, task.split, task.map_seed) == ("maze/validation/4", "validation", 4)


def test_a_slow_task_is_issued_again_then_with_patience_then_never():
    tasks = TaskStream(0, ENDLESS)
    slow = draw(tasks)
    assert tasks.requeue(slow) == "again"
    assert tasks.peek() == Queued(slow, False)
    assert draw(tasks) == slow
    assert tasks.requeue(slow) == "wait"
    assert tasks.peek() == Queued(slow, True)
    assert draw(tasks) == slow
    assert tasks.requeue(slow) == "too slow"
    assert tasks.cursor.quarantined == {slow.task_id: "too slow"}
    assert draw(tasks).task_id == "maze/train/1"


def test_groups_of_a_task_that_are_evicted_at_once_do_not_quarantine_it():
    tasks = TaskStream(0, finite(1))
    task = draw(tasks)
    assert [tasks.requeue(task, waited=False) for _ in range(4)] == ["again", *["wait"] * 3]
    assert tasks.requeue(task) == "too slow" == tasks.requeue(task)
    tasks.queue_again(task)
    assert tasks.cursor.queue == [] and tasks.exhausted()


def test_a_completed_group_clears_the_tasks_age():
    tasks = TaskStream(0, finite(3))
    task = draw(tasks)
    tasks.requeue(task)
    tasks.completed(task, 0.5)
    tasks.completed(task, 1.0)
    tasks.completed(task, None)
    assert tasks.requeue(task) == "again"
    assert tasks.cursor.success == {task.task_id: 1.0}


@pytest.mark.parametrize("solved, failed", [(0.0, 0.5), (0.25, 1.0), (1.0, 0.0)])
def test_a_pass_meets_what_is_solved_or_failed_as_often_as_it_is_told(solved, failed):
    tasks = TaskStream(1, TaskSource(env="maze", params={}, train=3, solved=solved, failed=failed))
    for number, success in enumerate((1.0, 0.0, 0.375)):
        tasks.completed(numbered(number), success)
    met = collections.Counter()
    for _ in iter(lambda: tasks.cursor.walks.get("tasks", Walk()).position < 3000, False):
        met[draw(tasks).map_seed] += 1
    for number, chance in enumerate((solved, failed, 1.0)):
        assert met[number] == pytest.approx(1000 * chance, abs=5 * math.sqrt(1000) * 0.5)


def test_where_no_task_is_worth_it_the_next_one_is_met_all_the_same():
    tasks = TaskStream(1, TaskSource(env="maze", params={}, train=4, solved=0.0, failed=0.0))
    for number in range(4):
        tasks.completed(numbered(number), float(number % 2))
    assert sorted(draw(tasks).map_seed for _ in range(4)) == [0, 1, 2, 3]


def test_quarantined_tasks_are_skipped_until_none_is_left():
    tasks = TaskStream(0, finite(3))
    tasks.quarantine("maze/train/1", "environment")
    assert {draw(tasks).map_seed for _ in range(8)} == {0, 2}
    for number in (0, 2):
        tasks.quarantine(f"maze/train/{number}", "environment")
    assert tasks.peek() is None


# ---- the pool


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_synthetic_tasks_is_as_asked_for(share):
    tasks = TaskStream(0, ENDLESS)
    tasks.offer(made(*range(10)), 0)
    drawn = [draw(tasks, share).origin for _ in range(2000)]
    expected = 2000 * share
    assert drawn.count("synthetic") == pytest.approx(expected, abs=5 * math.sqrt(2000 * 0.25))
    assert share not in (0.0, 1.0) or drawn.count("synthetic") == expected


def test_without_a_pool_only_a_run_that_wants_nothing_else_has_no_task():
    tasks = TaskStream(0, ENDLESS)
    assert tasks.peek(1.0) is None
    assert [draw(tasks, 0.9).origin for _ in range(5)] == ["original"] * 5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 9))
def test_every_pass_over_a_growing_pool_meets_each_task_it_began_with_once(batches, seed):
    tasks, offered, first = TaskStream(seed, ENDLESS), 0, -1
    for size in batches:  # offered in the middle of a pass, so that it is for the next one
        known = offered
        tasks.offer(made(*range(offered, offered + size)), 0)
        offered += size
        if known:
            rest = [draw(tasks, 1.0).map_seed for _ in range(known - 1)]
            assert sorted([*rest, first]) == list(range(known))
        first = draw(tasks, 1.0).map_seed
        assert offered == 1 or first in range(offered)
    met = [first, *(draw(tasks, 1.0).map_seed for _ in range(3 * offered - 1))]
    assert [sorted(met[i * offered : (i + 1) * offered]) for i in range(3)] == [
        list(range(offered))
    ] * 3


def test_the_pool_prefers_what_is_neither_solved_nor_hopeless():
    tasks = TaskStream(1, TaskSource(env="maze", params={}, train=0, solved=0.0, failed=0.25))
    tasks.offer(made(0, 1, 2, 3), 0)
    for number, success in enumerate((1.0, 0.0, 0.5)):
        tasks.completed(synthetic(number, "maze"), success)
    met = collections.Counter(draw(tasks, 1.0).map_seed for _ in range(1000))
    assert met[0] == 0 and met[2] > 300 and met[3] > 300
    assert met[1] == pytest.approx(met[2] / 4, abs=60)


def test_a_synthetic_task_ages_and_is_quarantined_like_any_other():
    tasks = TaskStream(0, ENDLESS)
    tasks.offer(made(0, 1), 0)
    slow = draw(tasks, 1.0)
    for word in ("again", "wait"):
        assert tasks.requeue(slow) == word
        assert draw(tasks, 0.0) == slow  # before anything else
    assert tasks.requeue(slow) == "too slow"
    assert tasks.pool_size() == 1
    assert {draw(tasks, 1.0).task_id for _ in range(5)} == {made(1 - slow.map_seed)[0].task_id}
    assert slow.task_id in tasks.known  # so that it is not taken in again


def test_the_pool_outlives_a_stage_and_serves_only_its_environment():
    tasks = TaskStream(0, ENDLESS)
    tasks.requeue(draw(tasks))
    tasks.offer([*made(0), *made(1, env="pond")], 0)
    tasks.switch(finite(5))
    assert draw(tasks).map_seed in range(5)
    assert [draw(tasks, 1.0).map_seed for _ in range(4)] == [0] * 4
    tasks.switch(TaskSource(env="pond", params={}, train=0))
    assert {draw(tasks, 1.0).map_seed for _ in range(4)} == {1}


@pytest.mark.parametrize(
    ("env", "params", "same"),
    [("maze", {"size": 3}, True), ("maze", {"size": 4}, False), ("pond", {"size": 3}, False)],
)
def test_a_stage_knows_nothing_of_other_tasks_with_the_same_ids(env, params, same):
    tasks = TaskStream(0, ENDLESS)
    tasks.offer(made(9), 0)
    for task in (numbered(0), made(9)[0]):
        tasks.completed(task, 1.0)
        tasks.requeue(task)
        tasks.requeue(task, complete=True)
        tasks.failed(task)
        tasks.quarantine(task.task_id, "environment")
        tasks.cursor.ages[task.task_id] = tasks.cursor.missed[task.task_id] = 1
    tasks.cursor.success[numbered(0).task_id] = 1.0
    tasks.switch(TaskSource(env=env, params=params, train=5))
    at = tasks.cursor
    for known in (at.ages, at.missed, at.failures, at.quarantined, at.success):
        assert (numbered(0).task_id in known) == same
        assert made(9)[0].task_id in known, "a task of the pool has its own parameters"


def test_a_stage_knows_nothing_of_another_files_tasks_with_the_same_ids(tmp_path):
    def of_file(query: str) -> TaskSource:
        path = tmp_path / query
        path.write_text(f'{{"id": "0", "query": "{query}", "split": "train"}}\n')
        given = given_tasks(rows_of(TasksConfig(path=str(path))), "maze", {}, "")
        return TaskSource(env="maze", params={}, train=1, given=given)

    tasks = TaskStream(0, of_file("easy"))
    tasks.quarantine(numbered(0).task_id, "environment")
    tasks.switch(of_file("easy"))
    assert tasks.cursor.quarantined
    tasks.switch(of_file("hard"))
    assert not tasks.cursor.quarantined


@pytest.mark.parametrize(
    ("prompt", "temperature", "episodes"), [("q", 0.0, 3), ("q", 0.7, 64), ("", 0.0, 64)]
)
def test_greedy_rows_are_not_played_again_to_fill_a_number(
    tmp_path, prompt: str, temperature: float, episodes: int
):
    """A greedy reply to the same prompt is the same; a task can still have chance of its own."""
    rows = [{"q": f"{n}", "split": "train" if n else "test", "seed": n} for n in range(2)]
    rows += [{"q": f"{n}", "split": "test", "seed": n} for n in range(2, 4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks = TasksConfig(path=str(path), prompt=prompt, split="split" if prompt else "")
    config = Config(tasks=tasks, eval=EvalConfig(temperature=temperature))
    assert source_of(config).episodes(64) == episodes
    assert source_of(config).episodes(2) == 2


def test_exploration_has_its_own_way_through_the_tasks():
    tasks = TaskStream(0, finite(5))
    tasks.quarantine("maze/train/3", "environment")
    met = []
    for _ in range(8):
        task = tasks.next_exploration()
        assert task is not None and task == tasks.next_exploration()
        tasks.explore(task)
        met.append(task.map_seed)
    assert sorted(met) == [0, 0, 1, 1, 2, 2, 4, 4]
    assert [draw(tasks).map_seed for _ in range(4)] == [
        draw(other).map_seed for other in [_quarantined(3)] for _ in range(4)
    ]


def _quarantined(number: int) -> TaskStream:
    tasks = TaskStream(0, finite(5))
    tasks.quarantine(f"maze/train/{number}", "environment")
    return tasks


def test_a_new_stage_with_other_tasks_goes_on_where_its_passes_would_stand():
    """The way of before a pool existed: position // count is the pass, position % count the place
    in it."""
    tasks = TaskStream(7, finite(4))
    for _ in range(6):
        draw(tasks)
    tasks.switch(finite(5))
    fresh = TaskStream(7, finite(5))
    for _ in range(6):
        draw(fresh)
    assert [draw(tasks) for _ in range(9)] == [draw(fresh) for _ in range(9)]


def test_the_last_stage_of_grpo_roc_meets_only_what_the_stages_before_left_unsolved():
    config = load(Path(__file__).parents[3] / "configs" / "grpo_roc.yaml")
    tasks = TaskStream(7, source_of(stage_config(config, 1)))
    solved = set()
    for number in range(tasks.source.train):
        task = draw(tasks)
        tasks.completed(task, 1.0 if number % 2 else 0.5)
        solved |= {task.task_id} if number % 2 else set()
    tasks.switch(source_of(stage_config(config, 3)))
    met = {draw(tasks).task_id for _ in range(80)}
    assert met and not met & solved


@given(st.integers(0, 30), st.integers(0, 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_stream_continues_after_a_restart(drawn, count, share):
    source = TaskSource(env="maze", params={}, train=count, solved=0.5, failed=0.5)
    tasks = TaskStream(3, source)
    for index in range(drawn):
        if index % 3 == 0:
            tasks.offer(made(index, 100 + index), 0)
        if tasks.peek(share) is not None:
            task = draw(tasks, share)
            if index % 4 == 0:
                tasks.requeue(task)
            tasks.completed(task, (0.0, 0.5, 1.0)[index % 3])
        exploring = tasks.next_exploration()
        if exploring is not None and index % 5 == 0:
            tasks.explore(exploring)
    restarted = TaskStream(3, source)
    saved = msgspec.msgpack.encode(tasks.cursor)
    restarted.restore(msgspec.msgpack.decode(saved, type=Cursor))
    for _ in range(10):
        left, right = tasks.peek(share), restarted.peek(share)
        assert left == right
        assert tasks.next_exploration() == restarted.next_exploration()
        if left is not None and right is not None:
            tasks.take(left.task)
            restarted.take(right.task)
