"""Tables of `doctor`: the capabilities of this machine, and the requirements of a recipe.

Every probe runs in a process of its own with a deadline, a few at a time: a library that crashes or
hangs is one row of the table.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evolver_async.config import Config
from evolver_async.config.shape import shape_of
from evolver_async.doctor import hours
from evolver_async.doctor.probes.result import ProbeResult
from evolver_async.doctor.recipe_check import Requirement, requirements
from evolver_async.memory.host_memory import available_bytes, uses_gpu
from evolver_async.memory.plan import MemoryPlan, memory_plan
from evolver_async.memory.units import gib
from evolver_async.terminal.console import SafeConsole

DEADLINE_S = 120.0  # of one probe; vLLM takes half a minute to import on a busy machine
AT_ONCE = 3
PLAIN_WIDTH = 120  # columns if the output is not a terminal


@dataclass(frozen=True)
class Capability:
    """One row: a probe, the keys that need it, and how to get it.

    `always` is True if every run needs it.
    """

    probe: str
    title: str
    purpose: str
    remedy: str
    always: bool = False


CAPABILITIES = (
    Capability("python", "Python", "", "Python 3.11 or newer", always=True),
    Capability("torch", "torch", "", "pip install -c constraints.txt -e .", always=True),
    Capability(
        "shared memory",
        "shared memory",
        "weights.dir",
        "mount -o remount,size=8G /dev/shm, or set weights.dir=DIR",
        always=True,
    ),
    Capability(
        "sockets",
        "sockets",
        "buffer.address",
        "needs a writable /tmp (TMPDIR) and a loopback interface",
        always=True,
    ),
    Capability(
        "disk", "disk", "run.dir", "free some space, or set run.dir=DIR elsewhere", always=True
    ),
    Capability("files", "open files", "buffer, many actors", "ulimit -n 65536", always=True),
    Capability(
        "cuda",
        "GPUs",
        "engine.device, learner.device",
        "needs an NVIDIA driver and torch for CUDA: pip install -c constraints-gpu.txt torch",
    ),
    Capability(
        "varlen",
        "flash attention",
        "learner.packing",
        "needs compute capability 8.0 or more; without it packing is exact but not faster",
    ),
    Capability("nccl", "NCCL", "learner.ranks", "comes with torch's CUDA build; CPUs use gloo"),
    Capability(
        "gloo",
        "gloo",
        "weights.kind=collective, learner.ranks",
        "needs a loopback interface, or set GLOO_SOCKET_IFNAME to another one",
    ),
    Capability(
        "vllm",
        "vLLM",
        "engine.kind=vllm",
        "pip install -c constraints-gpu.txt -e '.[gpu]'; on CPUs: make test-vllm",
    ),
    Capability(
        "sandbox",
        "sandbox",
        "env.name=code",
        "needs bubblewrap, root, or user namespaces (sysctl user.max_user_namespaces)",
    ),
    Capability(
        "faiss",
        "faiss",
        "experience, large pools",
        "pip install -e '.[faiss]', or '.[gpu]' for GPUs",
    ),
    Capability(
        "encryption", "encryption", "security.keys", "pip install pyzmq: its wheels have CURVE"
    ),
    Capability(
        "wandb",
        "W&B",
        "metrics.wandb=online",
        "wandb login, or set WANDB_API_KEY; offline needs neither",
    ),
    Capability("ray", "Ray", "clusters", "pip install -e '.[ray]'"),
)


def show_machine(console: Console) -> bool:
    """Show the capabilities of this machine. Return False if the default recipe cannot run."""
    results = run_probes({row.probe: () for row in CAPABILITIES})
    console.print(machine_table(results))
    missing = [row.title for row in CAPABILITIES if row.always and not results[row.probe].works]
    _conclude(console, "The default recipe", missing)
    return not missing


def show_recipe(console: Console, config: Config, recipe: Path, dotlist: Sequence[str]) -> bool:
    """Show what a recipe needs, key by key. Return False if it cannot run here."""
    probes: dict[str, tuple[str, ...]] = {row.probe: () for row in CAPABILITIES if row.always}
    probes |= {"shared memory": (config.weights.dir,), "disk": (config.run.dir,), "cuda": ()}
    probes |= dict.fromkeys(("recipe", "model"), (str(recipe), *dotlist))
    results = LazyResults(run_probes(probes))
    rows = [_of_capability(row, results[row.probe]) for row in CAPABILITIES if row.always]
    rows += requirements(config, results)
    listed = {row.key for row in rows if row.met is False}
    rows += [row for row in _of_start(results["recipe"]) if row.key not in listed]
    console.print(recipe_table(recipe, rows))
    if (shape := shape_of(config)) is not None:
        gpus = uses_gpu(config.learner.device), uses_gpu(config.engine.device)
        plan = memory_plan(config, shape, learner_gpu=gpus[0], actor_gpu=gpus[1])
        console.print(memory_table(plan, available_bytes()))
        if all(gpus):
            names = [one["name"] for one in results["cuda"].facts.get("devices", [])]
            for text in hours.texts(config, shape, hours.cards_of(config, names)):
                console.print(Text(text))
    missing = [row.key for row in rows if row.met is False]
    if Path(config.policy.path).is_dir() and config.policy.path and not missing:
        # alone: what runs beside it would take its time
        console.print(Text(probe("pace", str(recipe), *dotlist).summary))
    _conclude(console, str(recipe), missing)
    return not missing


def _conclude(console: Console, subject: str, missing: Sequence[str]) -> None:
    end = "can run here"
    if missing:
        end = f"cannot run here; change or provide: {', '.join(dict.fromkeys(missing))}"
    console.print(Text(f"{subject} {end}."), soft_wrap=True)


def run_probes(probes: Mapping[str, tuple[str, ...]]) -> dict[str, ProbeResult]:
    """Run the probes of these names, each with its arguments."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda name: probe(name, *probes[name]), probes)
        return dict(zip(probes, results, strict=True))


class LazyResults(dict[str, ProbeResult]):
    """Results by probe; a missing one is obtained at its first use."""

    def __missing__(self, name: str) -> ProbeResult:
        self[name] = probe(name)
        return self[name]


def probe(name: str, *arguments: str, deadline_s: float = DEADLINE_S) -> ProbeResult:
    """Run one probe in a process of its own; a crash or a timeout is a result too."""
    command = [sys.executable, "-m", "evolver_async.doctor.probes.probe_main", name, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=deadline_s
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(False, f"no result within {deadline_s:g} s (is the machine busy?)")
    if done.returncode < 0:
        return ProbeResult(False, f"crashed: {signal.Signals(-done.returncode).name}")
    if done.returncode > 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        return ProbeResult(False, f"ended with exit code {done.returncode}: {lines[-1]}")
    if not done.stdout:
        return ProbeResult(False, "ended without a result")
    return ProbeResult(**json.loads(done.stdout))


def machine_table(results: Mapping[str, ProbeResult]) -> Table:
    """Make a table with one row per capability, and a remedy for those that are missing."""
    table = Table("", "capability", "found", "needed by", "how to get it", show_edge=False)
    for row in CAPABILITIES:
        result = results[row.probe]
        purpose = "every run" if row.always else row.purpose
        remedy = "" if result.works else row.remedy
        mark = _mark(result.works, row.always)
        table.add_row(mark, row.title, Text(result.summary), purpose, Text(remedy))
    return table


def recipe_table(recipe: Path, rows: Sequence[Requirement]) -> Table:
    """Make a table with one row per key that requires something of the machine."""
    title = Text(str(recipe))
    table = Table("", "key", "requirement", title=title, title_justify="left", show_edge=False)
    for row in rows:
        table.add_row(_mark(row.met, True), Text(row.key), Text(row.why))
    return table


def memory_table(plan: MemoryPlan, available: float) -> Table:
    """Make a table of predicted memory: one row per part of a process, and the totals."""
    table = Table("process", "part", "host", "GPU", "key", title="Memory", title_justify="left")
    for one in plan.processes:
        name = one.role if one.count == 1 else f"{one.count} x {one.role}"
        for part in one.parts:
            host, gpu = ("", gib(part.size)) if part.gpu else (gib(part.size), "")
            table.add_row(Text(name), part.name, host, gpu, part.key)
        gpu = gib(one.gpu) if one.gpu else ""
        table.add_row(Text(name), "each", gib(one.private), gpu, "", style="bold")
    table.add_row("files of weights", "", gib(plan.shared), "", "weights.dir")
    table.add_row("all", f"of {gib(available)} available", gib(plan.host), "", "", style="bold")
    return table


def screen() -> Console:
    """Make a console as wide as the terminal, or wide enough for a file."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=PLAIN_WIDTH)


def _mark(met: bool | None, needed: bool) -> Text:
    if met is None:
        return Text("?", "yellow")
    if met:
        return Text("yes", "green")
    return Text("NO", "red") if needed else Text("no", "yellow")


def _of_capability(row: Capability, result: ProbeResult) -> Requirement:
    remedy = "" if result.works else f"; {row.remedy}"
    return Requirement(row.purpose or row.title, result.works, f"{result.summary}{remedy}")


def _of_start(result: ProbeResult) -> list[Requirement]:
    """Requirements for which the recipe's start would be refused, or the failure of that probe."""
    problems = result.facts.get("problems", [result.summary])
    split = [problem.partition(": ") for problem in problems]
    return [Requirement(key, False, why) for key, _, why in split] or [
        Requirement("environments, paths, addresses", True, "valid")
    ]
