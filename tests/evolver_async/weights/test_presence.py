"""Presence of receivers: who has ended, who is silent, and who cannot reach whom."""

import os
import socket
import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import wait_for

from evolver_async.weights.collective import presence
from evolver_async.weights.collective.presence import (
    Connections,
    Member,
    Presence,
    apart,
    unreachable,
)

HOST = "127.0.0.1"


def test_a_receiver_that_leaves_is_gone_at_once_and_others_are_not() -> None:
    leaves, stays = (Presence(HOST, lambda: False) for _ in range(2))
    connections = Connections()
    ports = {1: leaves.port, 2: stays.port}
    assert connections.add({one: Member("", "", HOST, ports[one]) for one in ports}) == {}
    assert connections.gone([1, 2]) == []
    leaves.close()
    wait_for(lambda: connections.gone([1, 2]) == [1], "its end to be seen", 5.0)
    refused = connections.add({1: Member("", "", HOST, leaves.port)})
    assert refused == {1: "ECONNREFUSED"}
    stays.close()
    connections.close()
    assert connections.gone([2]) == [2]


def test_a_receiver_that_stands_still_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.5)
    monkeypatch.setattr(presence, "BEAT_S", 0.1)
    beats = Presence(HOST, lambda: False)
    with socket.create_server((HOST, 0)) as still:  # as the kernel of a stopped process
        connections, began = Connections(), time.monotonic()
        ports = {1: beats.port, 2: still.getsockname()[1]}
        connections.add({one: Member("", "", HOST, ports[one]) for one in ports})

        def silent() -> list[int]:
            assert connections.gone([1, 2]) == []
            return connections.silent([1, 2], since=began)

        wait_for(lambda: silent() == [2], "its silence", 30.0)
        connections.close()
    beats.close()


def test_a_child_of_the_process_keeps_no_connection_open() -> None:
    listening = Presence(HOST, lambda: False)
    assert not os.get_inheritable(listening._listening.fileno())
    listening.close()


def test_ports_that_nothing_answers_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "REACH_S", 0.3)
    with socket.create_server((HOST, 0)) as serves, socket.create_server((HOST, 0)) as ends:
        closed = ends.getsockname()[1]
        ends.close()
        dropping = socket.create_server((HOST, 0), backlog=0)  # once full it drops, as a filter
        filled = [socket.socket() for _ in range(4)]
        for one in filled:
            one.setblocking(False)
            one.connect_ex(dropping.getsockname())
        ports = {1: serves.getsockname()[1], 2: closed, 3: dropping.getsockname()[1]}
        assert unreachable({one: (HOST, port) for one, port in ports.items()}) == [2, 3]
        for one in (*filled, dropping):
            one.close()


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=12))
def test_those_that_stay_reach_each_other_and_no_more_than_needed_leave(
    pairs: list[tuple[int, int]],
) -> None:
    lacking: dict[int, list[int]] = {one: [] for one in range(1, 9)}
    for one, other in pairs:
        if one != other:
            lacking[one].append(other)
    left_out = set(apart(lacking))
    stay = lacking.keys() - left_out
    assert not any(b in lacking[a] or a in lacking[b] for a, b in combinations(stay, 2))
    for one in left_out:  # each has a pair of its own, with one that stays or went after it
        assert lacking[one] or any(one in others for others in lacking.values())


def test_one_that_nobody_reaches_leaves_alone() -> None:
    assert apart({1: [2], 2: [1, 3], 3: [2], 4: [2]}) == [2]
    assert apart({1: [2], 2: [1], 3: []}) == [2]
    assert apart({1: [7], 2: []}) == [], "one that did not answer is no member"
