"""The library for scripts and notebooks: `train` runs a recipe and returns its results."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import dump
from evolver_async.errors import TRAINING_ERROR, USER_ERROR, TrainingError
from evolver_async.process.stopping import CODES
from evolver_async.results.run import RunResults, load_run

PREFIX = "evolver-async: "


def train(recipe: Path | str | Config, *overrides: str) -> RunResults:
    """Run a recipe to its end as `evolver-async train` does, and return the loaded run.

    `recipe` is a recipe's name, a YAML file or a `Config`; `overrides` are changes such as
    "learner.lr=3e-4". The launcher is a process of its own, so this also works where an event loop
    runs already, as in a notebook; its output appears here. An interrupt stops the run in order:
    it can be resumed. ConfigError for a mistake in the recipe, TrainingError for a run that failed.
    """
    if not isinstance(recipe, Config):
        return _train(str(recipe), overrides)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.yaml"  # the stem names the run
        dump(recipe, path)
        return _train(str(path), overrides)


def _train(recipe: str, overrides: tuple[str, ...]) -> RunResults:
    command = [sys.executable, "-m", "evolver_async.cli", "train", recipe, *overrides]
    run_dir, lines = None, []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the terminal's Ctrl-C reaches it through this process alone
    ) as launcher:
        assert launcher.stdout is not None
        try:
            for line in launcher.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
                # False for a line that no path can be; Path.is_file raises for a long one
                if run_dir is None and os.path.isfile(os.path.join(lines[-1], "config.yaml")):
                    run_dir = Path(lines[-1])
        except KeyboardInterrupt:
            launcher.send_signal(signal.SIGINT)
            print(launcher.stdout.read(), end="", flush=True)
            raise
    code = launcher.returncode
    if run_dir is not None and (code == 0 or code in CODES):
        return load_run(run_dir)
    sentence = "\n".join(lines[-5:])
    for line in lines:
        if line.startswith(PREFIX):
            sentence = line.removeprefix(PREFIX)
    if code == USER_ERROR and run_dir is None:
        raise ConfigError(sentence)
    reason = load_run(run_dir).end.reason if run_dir is not None else sentence
    name = "" if run_dir is None else f"{run_dir}: "
    kind = TrainingError if code == TRAINING_ERROR else RuntimeError
    raise kind(f"{name}training ended with exit code {code}: {reason}")
