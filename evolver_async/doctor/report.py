"""`doctor`: what this machine can do and how to get what it lacks, and whether a recipe can run.

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
from evolver_async.doctor.probes import Found
from evolver_async.doctor.recipe_check import Verdict, verdicts

DEADLINE_S = 120.0  # of one probe; vLLM takes half a minute to import on a busy machine
AT_ONCE = 3
PLAIN_WIDTH = 120  # where the output is no terminal


@dataclass(frozen=True)
class Part:
    """One row: a probe, what needs it, and how to get it. `always`: whatever is trained."""

    probe: str
    title: str
    purpose: str
    remedy: str
    always: bool = False


PARTS = (
    Part("python", "Python", "", "Python 3.11 or newer", always=True),
    Part("torch", "torch", "", "pip install -c constraints.txt -e .", always=True),
    Part(
        "shared memory",
        "shared memory",
        "weights.dir",
        "mount -o remount,size=8G /dev/shm, or weights.dir=DIR",
        always=True,
    ),
    Part(
        "sockets",
        "sockets",
        "buffer.address",
        "a writable /tmp (TMPDIR) and a loopback interface",
        always=True,
    ),
    Part("disk", "disk", "run.dir", "free some, or run.dir=DIR elsewhere", always=True),
    Part("files", "open files", "buffer, many actors", "ulimit -n 65536", always=True),
    Part(
        "cuda",
        "GPUs",
        "engine.device, learner.device",
        "an NVIDIA driver, and torch of a CUDA build: docs/scaling.md",
    ),
    Part(
        "varlen",
        "flash attention",
        "learner.packing",
        "a GPU of compute capability 8.0 or more; without it packing is exact, not faster",
    ),
    Part("nccl", "NCCL", "learner.ranks", "comes with torch's CUDA build; on CPUs gloo does it"),
    Part(
        "gloo",
        "gloo",
        "weights.kind=collective, learner.ranks",
        "a loopback interface; GLOO_SOCKET_IFNAME names another one",
    ),
    Part(
        "vllm",
        "vLLM",
        "engine.kind=vllm",
        "pip install -c constraints-gpu.txt -e '.[gpu]'; on CPUs `make test-vllm` makes .venv-vllm",
    ),
    Part(
        "sandbox",
        "sandbox",
        "env.name=code",
        "bubblewrap, root, or user namespaces (sysctl user.max_user_namespaces)",
    ),
    Part(
        "faiss",
        "faiss",
        "experience, large pools",
        "pip install -e '.[faiss]'; '.[gpu]' has the one for GPUs",
    ),
    Part("encryption", "encryption", "security.keys", "pip install pyzmq (its wheels have CURVE)"),
    Part(
        "wandb",
        "W&B",
        "metrics.wandb=online",
        "wandb login, or WANDB_API_KEY; offline needs neither",
    ),
    Part("ray", "Ray", "clusters", "pip install -e '.[ray]'"),
)


def examined(console: Console) -> bool:
    """Show the table; whether the embedded default can run here."""
    found = examine({part.probe: () for part in PARTS})
    console.print(machine_table(found))
    missing = [part.title for part in PARTS if part.always and not found[part.probe].works]
    _conclude(console, "The default recipe", missing)
    return not missing


def recipe_examined(console: Console, config: Config, recipe: Path, dotlist: Sequence[str]) -> bool:
    """Show what a recipe needs, key by key; whether it can run here."""
    asked: dict[str, tuple[str, ...]] = {part.probe: () for part in PARTS if part.always}
    asked |= {"shared memory": (config.weights.dir,), "disk": (config.run.dir,), "cuda": ()}
    asked |= dict.fromkeys(("recipe", "model"), (str(recipe), *dotlist))
    found = Examined(examine(asked))
    said = [_of_part(part, found[part.probe]) for part in PARTS if part.always]
    said += verdicts(config, found)
    said += _of_start(found["recipe"])
    console.print(recipe_table(recipe, said))
    wrong = [verdict.key for verdict in said if verdict.works is False]
    _conclude(console, str(recipe), wrong)
    return not wrong


def _conclude(console: Console, what: str, wrong: Sequence[str]) -> None:
    ends = f"cannot run here: {', '.join(dict.fromkeys(wrong))}" if wrong else "can run here"
    console.print(Text(f"{what} {ends}."), soft_wrap=True)


def examine(asked: Mapping[str, tuple[str, ...]]) -> dict[str, Found]:
    """What the probes of these names found, each given its arguments."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda name: probe(name, *asked[name]), asked)
        return dict(zip(asked, answers, strict=True))


class Examined(dict[str, Found]):
    """Findings by probe; one that nobody has asked for yet is run when somebody does."""

    def __missing__(self, name: str) -> Found:
        self[name] = probe(name)
        return self[name]


def probe(name: str, *arguments: str, deadline_s: float = DEADLINE_S) -> Found:
    """What one probe found; its death or silence is a finding too."""
    command = [sys.executable, "-m", "evolver_async.doctor.probes", name, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=deadline_s
        )
    except subprocess.TimeoutExpired:
        return Found(False, f"no answer within {deadline_s:g} s")
    if done.returncode < 0:
        return Found(False, f"crashed: {signal.Signals(-done.returncode).name}")
    if done.returncode > 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        return Found(False, f"ended with exit code {done.returncode}: {lines[-1]}")
    if not done.stdout:
        return Found(False, "ended without an answer")
    return Found(**json.loads(done.stdout))


def machine_table(found: Mapping[str, Found]) -> Table:
    """One row a part; the remedy only where something is missing."""
    table = Table("", "part", "found", "for", "how to get it", show_edge=False)
    for part in PARTS:
        one = found[part.probe]
        purpose = "every run" if part.always else part.purpose
        remedy = "" if one.works else part.remedy
        mark = _mark(one.works, part.always)
        table.add_row(mark, part.title, Text(one.said), purpose, Text(remedy))
    return table


def recipe_table(recipe: Path, said: Sequence[Verdict]) -> Table:
    """One row a key that wants something of the machine."""
    table = Table("", "key", "", title=Text(str(recipe)), title_justify="left", show_edge=False)
    for verdict in said:
        table.add_row(_mark(verdict.works, True), Text(verdict.key), Text(verdict.why))
    return table


def screen() -> Console:
    """A console as wide as the terminal, or wide enough for a file."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _mark(works: bool | None, needed: bool) -> Text:
    if works is None:
        return Text("?", "yellow")
    if works:
        return Text("yes", "green")
    return Text("NO", "red") if needed else Text("no", "yellow")


def _of_part(part: Part, found: Found) -> Verdict:
    remedy = "" if found.works else f"; {part.remedy}"
    return Verdict(part.purpose or part.title, found.works, f"{found.said}{remedy}")


def _of_start(found: Found) -> list[Verdict]:
    """What the recipe's own start would refuse; where that died, that is what is said."""
    problems = found.facts.get("problems", [found.said])
    split = [problem.partition(": ") for problem in problems]
    return [Verdict(key, False, why) for key, _, why in split] or [
        Verdict("environments, paths, addresses", True, "are what they must be")
    ]
