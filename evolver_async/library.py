"""The library for scripts and notebooks: `train` runs a recipe and returns its results."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import dump
from evolver_async.errors import TRAINING_ERROR, USER_ERROR, TrainingError
from evolver_async.notebook import import_path
from evolver_async.process.stopping import CODES
from evolver_async.runs.results.loaded_run import RunResults, load_run

PREFIX = "evolver-async: "
NESTED = "EVOLVER_ASYNC_NESTED"  # variable of the processes of a run, which must not begin another


def train(
    recipe: Path | str | Config = "own",
    *overrides: str,
    model: Path | str = "",
    data: Any = None,
    prompt: str = "prompt",
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
) -> RunResults:
    """Run a recipe to its end as `evolver-async train` does, and return the loaded run.

    `recipe` is a recipe's name, a YAML file or a `Config`; `overrides` are changes such as
    "learner.lr=3e-4". The other arguments stand for `policy.path`, `tasks.path`, `tasks.prompt` and
    `reward.terms`: `data` is a path, a list of rows (dicts) or a `datasets.Dataset`, `reward` one
    or several functions, or their names. A function that a notebook defines is written to a file
    of the working directory.

        results = train("frozen_lake", "run.seed=1")
        results = train(model="/models/m", data=rows, prompt="question", reward=correct)

    The launcher is a process of its own, so this also works where an event loop runs already, as in
    a notebook; its output appears here. An interrupt stops the run in order: it can be resumed.
    ConfigError for a mistake in the arguments, TrainingError for a run that failed.
    """
    if NESTED in os.environ:
        raise ConfigError(
            "train: was called while a process of a run imported this script for its functions:"
            " write the call below `if __name__ == '__main__':`"
        )
    with tempfile.TemporaryDirectory() as directory:
        changes, paths = [*overrides], list[Path]()
        if data is not None:
            path = data if isinstance(data, str | Path) else _written(data, Path(directory))
            changes += [f"tasks.path={path}", f"tasks.prompt={prompt}"]
        if model:
            changes.append(f"policy.path={model}")
        terms = [reward] if isinstance(reward, str) or callable(reward) else [*reward]
        for place, term in enumerate(terms):
            if callable(term):
                terms[place], root = import_path(term, Path.cwd())
                paths.append(root)
        if terms:
            changes.append(f"reward.terms=[{','.join(map(str, terms))}]")
        if isinstance(recipe, Config):
            dump(recipe, Path(directory) / "run.yaml")  # the stem names the run
            recipe = Path(directory) / "run.yaml"
        return _train(str(recipe), changes, paths)


def _written(data: Any, directory: Path) -> Path:
    """Write rows, or a `datasets.Dataset`, into `directory`; return the path for `tasks.path`."""
    if hasattr(data, "save_to_disk"):
        data.save_to_disk(directory / "rows")
        return directory / "rows"
    path = directory / "rows.jsonl"
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False) for row in data]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data: must be a path, rows (dicts) or a Dataset: {error}") from None
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _train(recipe: str, overrides: Sequence[str], paths: Sequence[Path]) -> RunResults:
    """Run the launcher, with `paths` to import from; load the run, or raise what it ended with."""
    searched = [str(path) for path in paths] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = os.environ | {NESTED: "1", "PYTHONPATH": os.pathsep.join(filter(None, searched))}
    command = [sys.executable, "-m", "evolver_async.cli", "train", recipe, *overrides]
    run_dir, lines = None, []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
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
