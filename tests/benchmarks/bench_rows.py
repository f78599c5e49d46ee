"""Seconds from the start to a run's first data with a million rows, and peak memory.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_rows.py [TOKENIZER] [--rows 1000000] \\
        [KEY=VALUE …]

Writes the rows as JSON lines, and a model of random weights with the tokenizer and the template of
the model in TOKENIZER, then runs `evolver-async train own …` on them, without a change but those
given, until its first reply. Printed are the seconds of some lines of the console, and the largest
resident size (VmHWM, which counts pages of files that are mapped) of the launcher and the buffer.
"""

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

MODEL = "models/SmolLM2-135M-Instruct"  # written by `make model`
ROLES = ("buffer", "learner", "actor", "prepare")
SAMPLE_S = 0.1
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 32,
}


def write_rows(path: Path, count: int) -> None:
    draw = random.Random(0)
    with open(path, "w") as file:
        for number in range(count):
            one, other = draw.randrange(10**6), draw.randrange(10**6)
            question = f"What is {one} plus {other}? Answer with the number alone."
            file.write(
                f'{{"question": "{question}", "answer": "{one + other}", "source": "{number}"}}\n'
            )


def write_model(source: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    config.update(SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)


def sample(root: psutil.Process, peaks: dict[str, int], over: threading.Event) -> None:
    """Note the largest resident size of every role until all is over."""
    while not over.wait(SAMPLE_S):
        try:
            for process in (root, *root.children(recursive=True)):
                command = process.cmdline()
                role = next((one for one in ROLES if one in command), "launcher")
                if process.pid != root.pid and role == "launcher":
                    continue  # a helper of a package
                text = Path(f"/proc/{process.pid}/status").read_text()
                if found := re.search(r"VmHWM:\s+(\d+)", text):
                    peaks[role] = max(peaks.get(role, 0), int(found[1]) << 10)
        except (psutil.Error, OSError):
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("tokenizer", type=Path, nargs="?", default=Path(MODEL))
    parser.add_argument("--rows", type=int, default=1_000_000)
    args, changes = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rows-") as made:
        directory = Path(made)
        write_rows(directory / "rows.jsonl", args.rows)
        write_model(args.tokenizer, directory / "model")
        command = [
            *(sys.executable, "-m", "evolver_async.cli", "train", "own"),
            f"policy.path={directory / 'model'}",
            f"tasks.path={directory / 'rows.jsonl'}",
            *("tasks.prompt=question", "reward=[number]", f"run.dir={directory}"),
            *("run.name=run", "stages=[{kind: rl, steps: 1}]", *changes),
        ]
        begun, peaks, over = time.monotonic(), dict[str, int](), threading.Event()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            assert run.stdout is not None
            watching = threading.Thread(
                target=sample, args=(psutil.Process(run.pid), peaks, over), daemon=True
            )
            watching.start()
            for line in run.stdout:
                print(f"{time.monotonic() - begun:6.1f} s  {line.rstrip()[:140]}", flush=True)
                if line.startswith("first reply"):
                    run.send_signal(signal.SIGINT)
            over.set()
            watching.join()
    for role, size in sorted(peaks.items()):
        print(f"{role}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
