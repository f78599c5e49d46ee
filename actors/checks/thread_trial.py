"""Trial of environments that do not say whether threads can share them, before the run starts."""

import threading

from actors.envs.base import env_class, isolation_of, make_env, one_line, undeclared
from evolver_async.config import Config, ConfigError
from evolver_async.extension import RAISED
from evolver_async.schema import Task

AT_ONCE = 6  # episodes begun together; few processors show a race seldom, a shared state always


def check_threads(config: Config, task: Task) -> None:
    """Raise ConfigError, which names `env.isolation`, for an environment of others that begins an
    episode alone, but not several in threads at once.

    What cannot begin alone, or not within `env.step_timeout_s`, is left to the checks of prompts
    and to the run.
    """
    found = env_class(task.env)
    if config.env.isolation != "auto" or not undeclared(task.env, found):
        return
    if config.launch.kind == "serial" or isolation_of(task.env, found) != "thread":
        return
    if _begin([task], config.env.step_timeout_s) != [""]:
        return
    if problem := max(_begin([task] * AT_ONCE, config.env.step_timeout_s), default=""):
        raise ConfigError(
            f"env.isolation: {task.env} begins one episode, but not {AT_ONCE} in threads at once"
            f" ({problem}): set it to process, or to thread if this was chance"
        )


def _begin(tasks: list[Task], limit_s: float) -> list[str]:
    """Begin and close an episode of each task in a thread of its own; return their errors, "" for
    none, none at all if one has not ended in time."""
    barrier, problems = threading.Barrier(len(tasks)), [""] * len(tasks)

    def begin(index: int, task: Task) -> None:
        barrier.wait()
        try:
            env = make_env(task.env, task.params)
            try:
                env.reset(task, index)
            finally:
                env.close()
        except RAISED as error:
            problems[index] = one_line(error)

    threads = [threading.Thread(target=begin, args=pair, daemon=True) for pair in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return [] if any(thread.is_alive() for thread in threads) else problems
