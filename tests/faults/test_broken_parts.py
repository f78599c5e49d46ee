"""What users bring fails, and the console or STATUS says so: which, how, how often, within 10 s.

Every case is a real run as small as it can be, ended as soon as it was seen.
"""

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import broken
import pytest
from launches import COMMAND, DEADLINE_S, wait_for
from openai_server import OpenAIServer

from evolver_async.durations import since_1970
from evolver_async.launch.run_directory import address_of
from evolver_async.runs.watch.status_text import ask, status_lines

WITHIN_S = 10.0
RECIPE = f"""
env: {{name: bandit, step_timeout_s: {broken.LIMIT_S}, episode_timeout_s: 60}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 2, max_turns: 1, max_tokens: 4}}
actors: {{count: 1, groups: 2}}
learner: {{groups_per_step: 64, minibatches: 1, decay: none, token_budget: 512}}
stages: [{{kind: rl, steps: 1000}}]
eval: {{every: 0}}
metrics: {{panel: lines}}
"""


class Console:
    """A run, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], printed: Path, run_dir: Path) -> None:
        self.process = process
        self.printed = printed
        self.run_dir = run_dir

    def waits_for(self, pattern: str) -> float:
        """The moment at which the console has such a line."""

        def look() -> float:
            text = self.printed.read_text(errors="replace")
            if re.search(pattern, text):
                return time.time()
            assert self.process.poll() is None, text
            return 0.0

        return wait_for(look, f"{pattern!r}; {self.printed.read_text(errors='replace')}")

    def waits_for_status(self, pattern: str) -> float:
        """The moment at which `evolver-async status` has such a line."""

        def look() -> float:
            status = asyncio.run(ask(address_of(self.run_dir), timeout_s=DEADLINE_S))
            return time.time() if re.search(pattern, "\n".join(status_lines(status))) else 0.0

        return wait_for(look, repr(pattern))

    def logged(self, words: str) -> float:
        """When the actor first logged these words."""
        for line in (self.run_dir / "logs" / "actor-0.log").read_text().splitlines():
            if words in line:
                return since_1970(line.partition(" ")[0])
        raise AssertionError(f"{words!r} was not logged")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., "Iterator[Console]"]:
    """Begins a run with these changes to the recipe and ends it at the end of the block."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))  # where broken is
    monkeypatch.setenv(broken.DIRECTORY, str(tmp_path))
    recipe, printed = tmp_path / "recipe.yaml", tmp_path / "console"
    recipe.write_text(
        f"{RECIPE}run: {{dir: {tmp_path}, name: run}}\nweights: {{dir: {tmp_path}}}\n"
    )

    @contextmanager
    def begun(*changes: str) -> Iterator[Console]:
        with open(printed, "wb") as output:
            process = subprocess.Popen(
                [*COMMAND, "train", str(recipe), *changes], stdout=output, stderr=output
            )
        try:
            yield Console(process, printed, tmp_path / "run")
        finally:
            process.kill()  # takes its children along
            process.wait()

    return begun  # type: ignore[return-value]


def happened(tmp_path: Path, name: str) -> float:
    return float((tmp_path / name).read_text())


def check_quick(what: str, seen: float, happened: float) -> None:
    print(f"{what}: told {seen - happened:.1f} s after it happened")
    assert seen - happened < WITHIN_S, what


AGENT = {  # the mistakes of broken.fails, in their order
    "raises": r"agent broken:fails failed \S+( times)?, last: KeyError: 'no such arm'",
    "asks_for_less": r"agent call broken:fails failed .*refused: top_p",
    "earns_nothing": r"agent broken:fails failed .*ValueError: it returned NoneType",
    "calls_on": r"agent call broken:fails failed .*refused: an episode has at most 1 calls",
    "hangs": r"agent broken:fails failed .*last: TimeoutError: env.episode_timeout_s",
}


def test_an_agent_that_fails_in_one_way_after_the_other_is_told_each_time(
    run: Callable[..., Iterator[Console]], tmp_path: Path
) -> None:
    """The console repeats who fails after half a minute alone: STATUS has later ways to fail."""
    mistake, following = tmp_path / broken.MISTAKE, tmp_path / "following"
    mistake.write_text("raises")
    patient = (f"env.episode_timeout_s={broken.LIMIT_S}", "buffer.max_attempts=1000")
    with run("rollout.agent=broken:fails", *patient) as console:  # type: ignore[attr-defined]
        for index, (name, pattern) in enumerate(AGENT.items()):
            following.write_text(name)
            following.replace(mistake)
            seen = console.waits_for(pattern) if index < 2 else console.waits_for_status(pattern)
            check_quick(name, seen, happened(tmp_path, name))


def test_environments_that_fail_are_on_the_console_and_an_async_one_works(
    run: Callable[..., Iterator[Console]], tmp_path: Path
) -> None:
    errors = {
        "Raises": "step: OSError: the floor fell in",
        "Hangs": f"step: TimeoutError: env.step_timeout_s is {broken.LIMIT_S:g}",
        "NoNumber": "step: ValueError: a reward of nan",
    }
    mixture = ", ".join(f"{{env: 'broken:{name}', weight: 1}}" for name in (*errors, "Awaited"))
    changes = (f"tasks.mixture=[{mixture}]", "stages=[{kind: sft, steps: 1000}]")
    with run(*changes, "learner.groups_per_step=1") as console:  # type: ignore[attr-defined]
        for name, error in errors.items():
            pattern = rf"environment broken:{name} failed \S+( times)?, last: {re.escape(error)}"
            check_quick(name, console.waits_for(pattern), happened(tmp_path, name))
        console.waits_for(r"step \d+/1000 sft  success 1")  # only of async ones
    assert happened(tmp_path, "Awaited")
    assert "broken:Awaited failed" not in console.printed.read_text()


def test_a_policy_that_nobody_reads_and_a_judge_that_answers_nonsense_and_goes_are_told(
    run: Callable[..., Iterator[Console]],
) -> None:
    with ExitStack() as listening:
        url = listening.enter_context(OpenAIServer(otherwise="the weather is fine")).url
        judge = ["judge.kind=llm", f"judge.llm.url={url}", "judge.llm.model=m"]
        judge += ["judge.llm.retries=0", "judge.llm.breaker_s=1"]
        with run(*judge) as console:  # type: ignore[attr-defined]
            policy = r"policy rollout.format=think_answer failed .*no turn of 2 episodes could be"
            seen = console.waits_for(policy)
            check_quick("unreadable", seen, console.logged("no turn of"))
            failed = rf"judge {re.escape(url)} failed "
            seen = console.waits_for(rf"{failed}.*the answer cannot be parsed")
            check_quick("nonsense", seen, console.logged("the answer cannot be parsed"))
            listening.close()
            closed = time.time()
            check_quick("gone", console.waits_for_status(rf"{failed}.*ConnectError"), closed)
