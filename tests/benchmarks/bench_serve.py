"""Simulated people at a served run: do ratings teach the policy, and how long do they wait?

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_serve.py [SECONDS]

`USERS` people, a thread each, ask the same question of `examples/serve.yaml` without a pause, and
their thumb is up if the answer ends in a vowel. Prints the mean rating of the first and the last
fifth of the time, and the overhead of a reply: the seconds of the call less those that its
conversation was with the engine, which the run's journal has. Fails if the rating does not rise by
`RISE`, over `REQUIRED` ms of overhead at p99, and if an acknowledged rating was trained twice, or
was lost though it was delivered.
"""

import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from launches import Launch, free_port, wait_for

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records

USERS, SECONDS, REQUIRED, RISE = 8, 100.0, 50.0, 0.2
KEYS = [f"user-{number}-{'k' * 20}" for number in range(USERS)]
QUESTION = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
SETTINGS = (
    *("learner.lr=1e-3", "learner.groups_per_step=32", "rollout.serve.calls_per_minute=100000"),
    *("buffer.archive=all", "stages=[{kind: rl, steps: 100000}]", "metrics.panel=none"),
)


class Said:
    """What one person did: by conversation the time of its answer, its seconds and its rating."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, float, float, float]] = []
        self.ratings_s: list[float] = []


def person(base: str, key: str, until: float, said: Said) -> None:
    client = httpx.Client(base_url=base, timeout=60, trust_env=False, headers={"x-api-key": key})
    while (began := time.monotonic()) < until:
        answer = client.post("/v1/chat/completions", json=QUESTION).raise_for_status().json()
        answered = time.monotonic()
        text = answer["choices"][0]["message"]["content"].strip()
        reward = float(text[-1:] in tuple("aeiou"))
        rating = client.post(f"/episodes/{answer['id']}/reward", json={"reward": reward})
        rating.raise_for_status()
        said.ratings_s.append(time.monotonic() - answered)
        (number,) = re.findall(r"\d{6,}", answer["id"])
        said.answers.append((int(number), began, answered - began, reward))


def quantile_ms(seconds: list[float], share: float) -> float:
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def arrived(run_dir: Path) -> tuple[Counter[int], dict[int, float]]:
    """Return how often each conversation is in the journal, and its seconds with the engine."""
    reader, counts, engine_s = JournalReader(run_dir / "journal"), Counter[int](), {}
    for record, location in reader.read():
        if isinstance(record, records.Arrived):
            counts[record.conversation] += 1
            if (trajectory := reader.trajectory(location)) is not None:
                engine_s[record.conversation] = trajectory.timing["generate_s"]
    return counts, engine_s


def main(seconds: float) -> int:
    names = " ".join(f"user{number}={key}" for number, key in enumerate(KEYS))
    os.environ |= {"SERVE_KEY": "operator-" + "k" * 20, "SERVE_USERS": names}
    os.environ |= {"WANDB_MODE": "disabled"}
    with tempfile.TemporaryDirectory() as directory:
        port, run_dir = free_port(), Path(directory) / "serve"
        settings = *SETTINGS, f"run.dir={directory}", "run.name=serve"
        example = Path(__file__).parents[2] / "examples" / "serve.yaml"
        port_is = f"rollout.endpoint.port={port}"
        launch = Launch(run_dir, example, *settings, port_is)
        base = f"http://127.0.0.1:{port}"

        def listens() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(base, trust_env=False).status_code == 200
            return False

        try:
            wait_for(listens, "the endpoint")
            began = time.monotonic()
            said = [Said() for _ in KEYS]
            people = [
                threading.Thread(target=person, args=(base, key, began + seconds, one))
                for key, one in zip(KEYS, said, strict=True)
            ]
            for one in people:
                one.start()
            for one in people:
                one.join()
            headers = {"x-api-key": os.environ["SERVE_KEY"]}
            counts = httpx.get(f"{base}/episodes", headers=headers, trust_env=False).json()[
                "counts"
            ]
        finally:
            launch.process.terminate()
            launch.end()
        taken, engine_s = arrived(run_dir)
    answers = sorted((one for each in said for one in each.answers), key=lambda one: one[1])
    fifth = [[], []]
    for _, at, _, reward in answers:
        if not seconds / 5 <= at - began < 4 * seconds / 5:
            fifth[at - began > seconds / 2].append(reward)
    first, last = map(statistics.fmean, fifth)
    over_s = [max(0.0, took - engine_s[id]) for id, _, took, _ in answers if id in engine_s]
    ratings_s = [one for each in said for one in each.ratings_s]
    p50, p99 = quantile_ms(over_s, 0.5), quantile_ms(over_s, 0.99)
    print(f"{len(answers)} answers in {seconds:g} s; ratings {first:.3f}, then {last:.3f}")
    print(f"overhead of a reply: p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {REQUIRED:g}")
    rating = f"p50 {quantile_ms(ratings_s, 0.5):.1f} ms, p99 {quantile_ms(ratings_s, 0.99):.1f} ms"
    print(f"a rating: {rating}; {counts['delivered']} delivered, {len(taken)} in the journal")
    once = all(count == 1 for count in taken.values()) and len(taken) >= counts["delivered"]
    return int(not (once and p99 <= REQUIRED and last - first >= RISE))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if sys.argv[1:] else SECONDS))
