"""Metrics of a running job for Prometheus: the newest row of metrics.jsonl, and STATUS.

evolver_<metric>                        every number of the newest row, / and . as _
evolver_eval_<metric>                   those of the newest evaluation
evolver_learner_wait_share              share of the newest step in which the learner waited
evolver_actors                          actors that the buffer has heard of lately
evolver_groups{state}                   groups of the buffer
evolver_trajectories{fate}              the ledger, over all kinds
evolver_failures{kind}                  failures of agents, environments, endpoints
evolver_present_step                    step for which the learner waits or which it computes
evolver_present_step_share              part of its data, or of its passes, that is done
evolver_present_step_eta_s              seconds until that is done, by the pace so far
evolver_stalled                         stalls
evolver_up                              1 if the buffer answers STATUS
"""

import asyncio
import itertools
import logging
import math
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily

from evolver_async.config import Config, ConfigError
from evolver_async.config.sections.weight_channel import host_and_port
from evolver_async.launch.run_directory import address_of
from evolver_async.launch.scaling import waited
from evolver_async.metrics.newest_lineage import RowKey, key_of, supersedes
from evolver_async.metrics.tail import Tail
from evolver_async.process.http_address import naming
from evolver_async.process.rendezvous import keys_of
from evolver_async.runs.watch.status_text import ask
from evolver_async.wire.client import Rejected

ASK_S = 2.0  # for an answer to STATUS
MOST_CLIENTS = 16  # connections at a time; further ones are closed at once
CLIENT_S = 10.0  # most time of a connection, its request and answer included
FATES = ("received", "held", "trained", "filtered", "evicted")
PREFIX = "evolver"

log = logging.getLogger(__name__)


@contextmanager
def served(run_dir: Path, config: Config) -> Iterator[None]:
    """Serve the metrics of a run at `metrics.prometheus` while the block runs.

    Raise ConfigError if the address cannot be used.
    """
    address = config.metrics.prometheus
    registry = CollectorRegistry()
    registry.register(RunMetrics(run_dir, config))
    with naming("metrics.prometheus", address):
        host, port = host_and_port(address)
        server = _server(host, port, make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server(host: str, port: int, app: Any) -> "_BoundedServer":
    """Listen at an address of either family. Raise OSError."""
    family, _, _, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    server_class = type("_Server", (_BoundedServer,), {"address_family": family})
    return make_server(str(place[0]), port, app, server_class, handler_class=_Handler)


class _BoundedServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread for each of at most `MOST_CLIENTS` connections of `CLIENT_S`.

    Otherwise clients could take every open file and every thread of the launcher.
    """

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._since: dict[socket.socket, float] = {}  # by open connection
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            room = len(self._since) < MOST_CLIENTS
            if room:
                self._since[request] = time.monotonic()
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that have taken too long; called twice a second."""
        with self._lock:
            late = [one for one, at in self._since.items() if time.monotonic() - at > CLIENT_S]
        for one in late:
            with suppress(OSError):  # it has just ended
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a client of metrics.prometheus has left early", exc_info=True)


class _Handler(WSGIRequestHandler):
    """Handler that writes no line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class RunMetrics:
    """Collector of the metrics of one run, read anew at every scrape."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir = run_dir
        self.config = config
        self.tail = Tail(run_dir / "metrics.jsonl")
        self.newest: dict[str, Any] = {}
        self.evaluations: dict[RowKey, dict[str, Any]] = {}  # none superseded
        self.reading = threading.Lock()  # several servers can scrape at a time

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield nothing: the names depend on the run."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the families of one scrape, each once."""
        seen: set[str] = set()
        with self.reading:
            self._read()
        for family in self._families():
            if family.name not in seen:
                seen.add(family.name)
                yield family

    def _read(self) -> None:
        """Keep the newest step and the evaluations of the rows written since the last scrape."""
        for row in itertools.chain.from_iterable(self.tail.pieces()):
            new = key_of(row)
            if new.kind == "eval":
                self.evaluations[new] = row
            elif new.kind == "take":
                if new.lineage != self.newest.get("lineage"):  # the run has gone back
                    kept = self.evaluations.items()
                    self.evaluations = {old: one for old, one in kept if not supersedes(new, old)}
                self.newest = row

    def _families(self) -> Iterator[GaugeMetricFamily]:
        newest = self.evaluations[max(self.evaluations)] if self.evaluations else {}
        evaluated = {name: one for name, one in newest.items() if name.startswith("eval/")}
        for name, value in (evaluated | self.newest).items():
            if isinstance(value, int | float) and math.isfinite(value):
                yield gauge(name, value)
        if (share := waited(self.newest)) is not None:
            yield gauge("learner_wait_share", share)
        status = self._status()
        yield gauge("up", float(status is not None))
        if status is not None:
            yield from families(status)

    def _status(self) -> dict[str, Any] | None:
        """Return the buffer's STATUS, None without an answer or without a buffer process."""
        if self.config.launch.kind == "serial":
            return None
        try:
            return asyncio.run(ask(address_of(self.run_dir), keys_of(self.config), ASK_S))
        except (TimeoutError, Rejected, ConfigError, ValueError) as error:
            log.info("no STATUS for Prometheus: %s", error)
            return None


def families(status: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    """Yield what a STATUS says."""
    yield gauge("actors", len(status["actors"]) + status["actors_not_shown"])
    yield labelled("groups", "state", status["groups"])
    yield labelled("trajectories", "fate", {f: _total(status["ledger"][f]) for f in FATES})
    failures: Counter[str] = Counter()
    for one in status["failures"]:
        failures[one["kind"]] += one["count"]
    yield labelled("failures", "kind", failures)
    for name in ("outstanding", "limit", "take", "stage"):
        yield gauge(f"buffer_{name}", status[name])
    yield gauge("buffer_journal_bytes", status["journal"]["bytes"])
    yield gauge("buffer_disk_free_bytes", status["journal"]["disk_free_bytes"])
    yield gauge("stalled", len(status["stalled"]))
    if (progress := status["progress"]) is not None:
        yield gauge("present_step", progress["step"])
        yield gauge("present_step_share", progress["share"])
        if progress["eta_s"] is not None:
            yield gauge("present_step_eta_s", progress["eta_s"])


def _total(amounts: dict[str, Any]) -> int:
    """Sum the trajectories of a part of the ledger, however deep its kinds and reasons are."""
    if "trajectories" in amounts:
        return amounts["trajectories"]
    return sum(_total(part) for part in amounts.values())


def gauge(name: str, value: float) -> GaugeMetricFamily:
    """Return a family of one value."""
    return GaugeMetricFamily(_name(name), name, value=value)


def labelled(name: str, label: str, values: dict[str, int] | Counter[str]) -> GaugeMetricFamily:
    """Return a family with one value for each label."""
    family = GaugeMetricFamily(_name(name), name, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _name(name: str) -> str:
    return f"{PREFIX}_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
