"""The censoring report: what was dropped against what was trained; tokens nobody took in."""

import logging

import pytest
from buffer_world import HEAD, World, config, trajectory
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.state.censoring import MEASURED, REPEAT_S, Censoring, GroupChange, Sums
from evolver_async.schema import Ticket
from evolver_async.wire import messages
from evolver_async.wire.envelope import SCHEMA_HASH


def episodes(count: int, *, tokens: int = 10, seconds: float = 1.0, success: bool = True) -> Sums:
    return Sums(count, count * tokens, count * 2, count * seconds, count * success)


def end(group_id: int, fate: str | None, *, missing: int = 0, leased_s: list[float] | None = None):
    reason = "age" if fate == "evicted" else ""
    return GroupChange(group_id, "maze", fate, reason, missing, leased_s or [])


def trained_and_evicted(evicted: Sums, **facts: object) -> Censoring:
    """One trained group of usual episodes, one evicted group."""
    censoring = Censoring()
    censoring.receive(0, "maze", episodes(MEASURED))
    censoring.follow(end(0, "trained"))
    censoring.receive(1, "maze", evicted)
    censoring.follow(end(1, "evicted", **facts))  # pyright: ignore[reportArgumentType]
    return censoring


def test_report_warns_when_the_evicted_are_longer():
    censoring = trained_and_evicted(episodes(MEASURED, tokens=16))
    warning = censoring.warning()
    assert warning is not None and "16 tokens (trained: 10)" in warning
    assert " s and more" not in warning and "succeeded" not in warning
    assert censoring.counters() == {
        "censor/evicted_share": 0.5,
        "censor/replayed_share": 0.0,
        "censor/length_ratio": 1.6,
        "censor/seconds_ratio": 1.0,
        "censor/success_gap": 0.0,
    }


def test_report_warns_when_the_evicted_are_harder():
    warning = trained_and_evicted(episodes(MEASURED, success=False)).warning()
    assert warning is not None and "succeeded at 0.00 (trained: 1.00)" in warning


@pytest.mark.parametrize(
    "evicted",
    [episodes(MEASURED), episodes(MEASURED, tokens=15), episodes(MEASURED - 1, tokens=99)],
)
def test_report_is_silent_about_alike_or_few_episodes(evicted):
    assert trained_and_evicted(evicted).warning() is None


def test_members_that_never_arrived_count_with_the_age_of_their_lease():
    """Of a group evicted for age only the short members are there: the missing ones matter."""
    censoring = trained_and_evicted(episodes(4), missing=70, leased_s=[9.0] * 60)
    warning = censoring.warning()
    assert warning is not None and "74 rollouts" in warning and "70 never arrived" in warning
    assert "8.5 s and more (trained: 1.0)" in warning
    compared = censoring.compare()
    assert compared.evicted_share == 74 / (74 + MEASURED)
    assert compared.length_ratio == 1.0


def test_members_that_are_played_again_are_lost_as_the_evicted_are() -> None:
    censoring = Censoring()
    censoring.receive(0, "maze", episodes(MEASURED))
    censoring.follow(end(0, "trained"))
    censoring.replay("maze", "environment", [9.0] * MEASURED)
    compared, table = censoring.compare(), censoring.report()["table"]
    assert compared.evicted_share == 0.0 and compared.replayed_share == 0.5
    assert compared.seconds_ratio == 9.0 and compared.length_ratio is None
    assert isinstance(table, dict) and table["maze"]["replayed: environment"]["missing"] == MEASURED
    warning = censoring.warning()
    assert warning is not None and "9.0 s and more (trained: 1.0)" in warning


def test_filtered_is_a_judgement_and_no_censoring():
    censoring = Censoring()
    for group, (fate, made) in enumerate(
        (("trained", episodes(MEASURED)), ("filtered", episodes(MEASURED, tokens=99)))
    ):
        censoring.receive(group, "maze", made)
        censoring.follow(end(group, fate))
    assert censoring.warning() is None
    assert censoring.counters() == {"censor/evicted_share": 0.0, "censor/replayed_share": 0.0}


def test_report_has_a_table_of_each_environment_and_of_all():
    censoring = trained_and_evicted(episodes(3, tokens=20), missing=1)
    censoring.receive(2, "bandit", episodes(5))
    report = censoring.report()
    table, comparison = report["table"], report["comparison"]
    assert isinstance(table, dict) and isinstance(comparison, dict)
    assert table["bandit"].keys() == {"received"}
    assert table["maze"].keys() == {"received", "trained", "evicted: age"}
    assert table["all"]["received"]["trajectories"] == MEASURED + 3 + 5
    assert table["maze"]["evicted: age"] == {
        "trajectories": 3,
        "missing": 1,
        "tokens_mean": 20.0,
        "turns_mean": 2.0,
        "successes_mean": 1.0,
        "seconds_mean": 1.0,
    }
    assert comparison["maze"]["length_ratio"] == 2.0
    assert comparison["bandit"]["length_ratio"] is None


def test_alarm_is_repeated_once_a_minute_and_only_after_further_evictions():
    censoring = trained_and_evicted(episodes(MEASURED, tokens=99))
    assert censoring.alarm(5.0)
    assert censoring.alarm(5.0 + 2 * REPEAT_S) is None
    censoring.receive(2, "maze", episodes(1))
    censoring.follow(end(2, "evicted"))
    assert censoring.alarm(4.0 + REPEAT_S) is None
    assert censoring.alarm(5.0 + REPEAT_S)


groups = st.lists(
    st.tuples(st.integers(1, 8), st.sampled_from(("trained", "filtered")), st.integers(0, 3))
)


@given(groups)
def test_every_group_counts_once_however_often_it_comes_back(made):
    censoring = Censoring()
    for group_id, (count, fate, returns) in enumerate(made):
        censoring.receive(group_id, "maze", episodes(count))
        censoring.follow(end(group_id, fate))
        for _ in range(returns):
            censoring.follow(end(group_id, None))
            censoring.follow(end(group_id, fate))
    for fate in ("trained", "filtered"):
        expected = sum(count for count, its_fate, _ in made if its_fate == fate)
        assert censoring.total(fate) == episodes(expected)
    censoring.forget(())
    assert not censoring._groups and not censoring._ends


# ---- in the buffer


def finish(world: World, tickets: list[Ticket], *, length: int, total_s: float) -> None:
    for ticket in tickets:
        for member in ticket.members:
            made = trajectory(ticket, member, length=length)
            made.timing = {"total_s": total_s}
            assert isinstance(world.one("actor-0", messages.Push(trajectory=made)), messages.Ack)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, config(max_staleness=1, lease_s=100.0))
    made.resume()
    return made


def trained(world: World, take: int) -> messages.Ok:
    finish(world, world.lease(credit=2), length=5, total_s=1.0)
    groups = [group.group_id for group in world.sample(take)]
    return world.done(take, groups, take + 1)


def test_buffer_reports_stragglers_that_it_evicted(world):
    (slow,) = world.lease(peer="slow")
    world.push(slow, 0, length=5)
    world.pass_time(30.0)
    trained(world, 0)
    reply = trained(world, 1)  # now the straggler can never be trained
    report = world.service.status(world.now)["censoring"]
    assert report["table"]["all"]["trained"]["trajectories"] == 8
    evicted = report["table"][slow.task.env]["evicted: age"]
    assert (evicted["trajectories"], evicted["missing"]) == (1, 1)
    assert evicted["seconds_mean"] == 15.0  # one of unknown length, one of 30 s so far
    assert reply.counters["censor/length_ratio"] == 1.0
    assert report["warning"] is None


def test_buffer_reports_members_that_failed_or_fell_silent(world):
    (failed,) = world.lease(peer="fails")
    world.pass_time(30.0)
    release = messages.Release(
        group_id=failed.group_id, members=failed.members, reason="environment"
    )
    world.one("fails", release)
    (drained,) = world.lease(peer="fails")
    world.one("fails", replace(release, group_id=drained.group_id, reason="drain"))
    world.lease(peer="silent")
    world.pass_time(101.0)
    report = world.service.status(world.now)["censoring"]
    table = report["table"]["all"]
    assert table["replayed: environment"] == {"trajectories": 0, "missing": 2, "seconds_mean": 30.0}
    assert table["replayed: silence"]["missing"] == 2
    assert "replayed: drain" not in table


def test_what_a_new_lineage_takes_back_counts_once(world):
    trained(world, 0)
    assert world.resume(lineage=1) == 2
    censoring = world.service.censoring
    assert censoring.total("trained") == Sums()
    groups = [group.group_id for group in world.sample(0, lineage=2)]
    world.done(0, groups, 1, lineage=2)
    assert censoring.total("trained").trajectories == 4
    world.one("learner", messages.Kept(take=1))
    assert not censoring._groups


def test_a_take_whose_report_was_lost_with_the_learner_counts_as_filtered(world):
    finish(world, world.lease(credit=2), length=5, total_s=1.0)
    assert len(world.sample(0)) == 2
    world.resume(lineage=1, take=1, version=1)
    assert world.service.censoring.total("filtered").trajectories == 4


def test_a_restarted_buffer_counts_from_its_start(world):
    finish(world, world.lease(credit=2), length=5, total_s=1.0)
    world.kill()
    groups = [group.group_id for group in world.sample(0)]
    world.done(0, groups, 1)
    assert world.service.censoring.total("trained") == Sums()
    trained(world, 1)
    assert world.service.censoring.total("trained").trajectories == 4


def test_buffer_logs_the_warning_once_a_minute(world, caplog):
    censoring = world.service.censoring
    for group, (fate, tokens) in enumerate((("trained", 1), ("evicted", 9))):
        censoring.receive(1000 + group, "maze", episodes(MEASURED, tokens=tokens))
        censoring.follow(end(1000 + group, fate))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            world.pass_time(1.0)
    assert sum("longer or harder" in record.message for record in caplog.records) == 1


# ---- tokens that nobody took in


@given(st.lists(st.lists(st.integers(1, 99), max_size=5), max_size=5))
def test_generated_tokens_add_up_over_restarts_of_an_actor(incarnations):
    activity = Activity()
    peer = activity.seen("actor-0", 0.0)
    for tokens in incarnations:
        peer.greet()
        for sampled in range(len(tokens) + 1):
            peer.report(sum(tokens[:sampled]))
    assert activity.generated() == sum(map(sum, incarnations))


def test_tokens_that_died_with_an_actor_are_unacknowledged(world):
    world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
    (ticket,) = world.lease()
    world.push(ticket, 0, length=11)
    world.one("actor-0", messages.Lease(credit=1, weights=HEAD, generated=25))
    ledger = world.service.status(world.now)["ledger"]
    assert (ledger["generated_tokens"], ledger["unacknowledged_tokens"]) == (25, 15)
    world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
    world.one("actor-0", messages.Lease(credit=1, weights=HEAD, generated=0))
    world.push(ticket, 1, length=11)
    world.one("actor-0", messages.Lease(credit=1, weights=HEAD, generated=10))
    counters = world.service._status.counters(world.now)
    assert counters["ledger/generated_tokens"] == 35.0
    assert counters["ledger/unacknowledged_tokens"] == 15.0


def test_a_restarted_buffer_counts_only_what_actors_sample_from_then_on(world):
    world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
    (ticket,) = world.lease()
    world.push(ticket, 0, length=11)
    world.kill()
    world.one("actor-0", messages.Lease(credit=1, weights=HEAD, generated=10))
    world.push(ticket, 1, length=11)
    world.one("actor-0", messages.Lease(credit=1, weights=HEAD, generated=20))
    ledger = world.service.status(world.now)["ledger"]
    assert (ledger["generated_tokens"], ledger["unacknowledged_tokens"]) == (10, 0)
