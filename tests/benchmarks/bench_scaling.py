"""Throughput of a latency-bound run by its number of actors, scaled live, on either launcher.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_scaling.py [KEY=VALUE ...] [--actors 1 4 16]

Each environment step takes a lognormal time (median 2 s, sigma 1). One run is scaled from number to
number with `evolver-async scale`; then back to 1. Of every number: accepted trajectories and groups
per second, the efficiency against the first, processor cores in use by all processes, the share of
its time in which the learner waited; the trajectories of the least, the median and the busiest
actor; the memory of an actor, resident and in proportion to those that share it. After that the
longest step of
the learner while actors joined or left, beside that of each window; the time from an engine that is
loaded to its first ticket; and the ledger.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records
from evolver_async.config import ConfigError
from evolver_async.durations import since_1970
from evolver_async.launch.run_directory import address_of, scale
from evolver_async.metrics.tail import Tail
from evolver_async.runs.watch.status_text import ask

RECIPE = """
env: {{name: bandit, latency: {{kind: lognormal, median_s: 2.0, sigma: 1.0}}}}
policy: {{max_length: 64, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: {count}, max: 64, scale_s: 86400, groups: 8}}
buffer: {{max_staleness: 63, lease_s: 60, stall_s: 240, straggler: wait}}
advantage: {{kind: reinforce}}
learner: {{groups_per_step: 32, minibatches: 1, lr: 1e-5, decay: none, token_budget: 8192}}
stages:  # an episode without a readable turn never reaches the environment
  - kind: sft
    steps: 25
    expert_fraction: 0.0
    override:
      env: {{latency: {{kind: none}}}}
      rollout: {{group_size: 1}}
      learner: {{groups_per_step: 16, lr: 1e-2}}
  - {{kind: rl, hours: 10}}
eval: {{every: 0, episodes: 1}}
checkpoint: {{every: 1000000}}
metrics: {{panel: none, samples: 0}}
launch: {{kind: {launch}, ray: {{address: local, actor_cpus: 0.05, learner_cpus: 0.05}}}}
run: {{dir: {directory}, name: run}}
"""
TRAJECTORIES = 800  # of a window
LEAST_S = 40.0
SETTLE_S = 20.0  # until as many groups of new actors finish as begin


class Running:
    """A run under measurement."""

    def __init__(self, directory: Path, count: int, launch: str, changes: list[str]) -> None:
        recipe = directory / "recipe.yaml"
        recipe.write_text(RECIPE.format(directory=directory, count=count, launch=launch))
        self.run_dir = directory / "run"
        command = [sys.executable, "-m", "evolver_async.cli", "train", str(recipe), *changes]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.tail = Tail(self.run_dir / "metrics.jsonl")
        self.scaled: list[tuple[float, float]] = []  # when actors joined or left
        self.busiest: list[float] = []  # the longest step meanwhile

    def status(self) -> dict[str, Any]:
        while True:
            try:
                return asyncio.run(ask(address_of(self.run_dir), timeout_s=30))
            except (TimeoutError, ConfigError):
                if self.process.poll() is not None:
                    raise SystemExit("the run ended") from None
                time.sleep(0.5)

    def scale(self, count: int) -> None:
        """Scale, and return when the number of actors is that one and all of them play."""
        began = time.monotonic()
        scale(self.run_dir, str(count))
        self.tail.rows()
        self.wait(count)
        self.scaled.append((began, time.monotonic()))
        if rows := [row for row in self.tail.rows() if "time/wait_s" in row]:
            self.busiest.append(longest(rows))

    def wait(self, count: int) -> None:
        """Return when so many actors play, in the stage that is measured."""
        while (
            self.status()["stage"] == 0
            or sum(one["leases"] > 0 for one in self.status()["actors"].values()) != count
        ):
            time.sleep(0.5)

    def cpu_s(self) -> float:
        total = 0.0
        processes = psutil.Process(self.process.pid).children(recursive=True)
        for one in [psutil.Process(self.process.pid), *processes]:
            try:
                times = one.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def window(self) -> dict[str, float]:
        """Measure until enough trajectories were accepted."""
        self.tail.rows()
        first, cpu, began = self.received(), self.cpu_s(), time.monotonic()
        played = self.played()
        while True:
            time.sleep(1.0)
            passed, now = time.monotonic() - began, self.received()
            if passed >= LEAST_S and now[1] - first[1] >= TRAJECTORIES:
                break
        rows = [row for row in self.tail.rows() if "time/wait_s" in row]
        waited = sum(row["time/wait_s"] for row in rows)
        shares = (self.played() - played).values()
        return {
            "least": min(shares),
            "median": statistics.median(shares),
            "most": max(shares),
            **self.memory(),
            "groups_per_s": (now[0] - first[0]) / passed,
            "trajectories_per_s": (now[1] - first[1]) / passed,
            "cores": (self.cpu_s() - cpu) / passed,
            "waits": waited / passed,
            "longest_step_s": longest(rows),
        }

    def played(self) -> Counter[str]:
        """Trajectories by the actor that was granted their group."""
        owners, found = {}, Counter[str]()
        for record, _ in JournalReader(self.run_dir / "journal").read():
            if isinstance(record, records.Granted):
                owners[record.group_id] = record.actor
            elif isinstance(record, records.Arrived) and record.group_id in owners:
                found[owners[record.group_id]] += 1
        return found

    def memory(self) -> dict[str, float]:
        """Mean MiB of an actor."""
        actors = [
            one.memory_full_info()
            for one in psutil.Process(self.process.pid).children(recursive=True)
            if one.cmdline()[3:4] == ["actor"]
        ]
        mib = len(actors) * (1 << 20)
        return {
            "rss": sum(one.rss for one in actors) / mib,
            "pss": sum(one.pss for one in actors) / mib,
        }

    def received(self) -> tuple[float, float]:
        """Groups trained or held ready, and trajectories accepted."""
        status = self.status()
        ledger = status["ledger"]["received"].get("rollout", {"groups": 0, "trajectories": 0})
        return ledger["groups"] - status["groups"]["open"], ledger["trajectories"]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--launch", default="local", choices=("local", "ray"))
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="other settings of the run")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as directory:
        run = Running(Path(directory), args.actors[0], args.launch, args.changes)
        try:
            found = {}
            run.wait(args.actors[0])
            for count in args.actors:
                run.scale(count)
                time.sleep(SETTLE_S)
                found[count] = run.window()
                report(args.launch, count, found[count], found[args.actors[0]], args.actors[0])
            run.scale(args.actors[0])
            status = run.status()
            print(f"evicted: {status['ledger']['evicted'].get('rollout', {})}")
            log = (run.run_dir / "logs" / "launcher.log").read_text()
            print(f"actors killed instead of leaving: {log.count('is killed')}")
            seconds = [round(end - begin, 1) for begin, end in run.scaled]
            print(f"seconds from asking to all playing: {json.dumps(seconds)}")
            print(f"longest busy step of each window: {busy(found)} s")
            joining = [round(one, 3) for one in run.busiest]
            print(f"longest busy step while actors joined or left: {joining} s")
            waits = first_tickets(run.run_dir)
            print(f"first ticket after a loaded engine: median {statistics.median(waits):.2f} s,")
            print(f"longest {max(waits):.2f} s, of {len(waits)} actors")
            print(f"ledger: {closed(status)}")
        finally:
            run.end()


def busy(found: dict[int, dict[str, float]]) -> list[float]:
    return [round(one["longest_step_s"], 3) for one in found.values()]


def longest(rows: list[dict[str, Any]]) -> float:
    """Seconds of the longest step, the wait for its data left out."""
    return max(
        sum(v for name, v in row.items() if name.startswith("time/") and "wait" not in name)
        for row in rows
    )


def first_tickets(run_dir: Path) -> list[float]:
    """Seconds from every actor's loaded engine to its first ticket."""
    found = []
    for path in (run_dir / "logs").glob("actor-*.log"):
        ready = 0.0
        for line in path.read_text().splitlines():
            if "the engine is ready" in line or "first ticket" in line:
                stamp = since_1970(line.partition(" ")[0])
                if "first ticket" in line:
                    found.append(stamp - ready)
                ready = stamp
    return found


def closed(status: dict[str, Any]) -> str:
    """Compare the trajectories that were received with what became of them."""
    ledger = status["ledger"]
    received = ledger["received"]["rollout"]["trajectories"]
    ended = sum(
        amount["trajectories"]
        for fate in ("trained", "filtered", "evicted")
        for amount in ledger[fate].get("rollout", {}).values()
    )
    held = sum(amount["trajectories"] for amount in ledger["held"]["rollout"].values())
    return f"{received} received = {ended} trained, filtered or evicted + {held} held"


def report(
    launch: str, count: int, now: dict[str, float], first: dict[str, float], least: int
) -> None:
    efficiency = now["trajectories_per_s"] / first["trajectories_per_s"] * least / count
    print(
        f"{launch} {count:3d} actors: {now['groups_per_s']:6.2f} groups/s,"
        f" {now['trajectories_per_s']:7.2f} trajectories/s, efficiency {efficiency:.2f},"
        f" {now['cores']:.2f} cores, learner waits {now['waits']:.0%}; trajectories of an actor"
        f" {now['least']:.0f} to {now['most']:.0f}, median {now['median']:.0f};"
        f" {now['rss']:.0f} MiB of an actor, in proportion {now['pss']:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
