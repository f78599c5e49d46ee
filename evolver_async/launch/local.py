"""The launcher for one machine: every process is a child of this one.

No child outlives this process, however it ends: the kernel kills them too (see `die_with`).
"""

import logging
import tempfile
from contextlib import suppress
from pathlib import Path

from evolver_async.config import Config
from evolver_async.errors import USER_ERROR
from evolver_async.launch.child import LocalSpawner
from evolver_async.launch.supervisor import Supervisor
from evolver_async.process.private_directories import PREFIX, Claim, claim, sweep
from evolver_async.process.rendezvous import make_weights_dir

log = logging.getLogger(__name__)


def run(config: Config, run_dir: Path) -> int:
    """Run to the end; return 0, 128 + the signal that ended it, or the exit code of a failure."""
    claims: list[Claim] = []
    try:
        try:
            for parent in (Path(config.weights.dir), Path(tempfile.gettempdir())):
                sweep(parent)
            claims.append(claim(make_weights_dir(config, run_dir)))
            # ipc addresses must be short, and the directory private
            claims.append(claim(Path(tempfile.mkdtemp(prefix=PREFIX))))
        except OSError as error:
            log.error("%s", error)
            return USER_ERROR
        private = claims[-1].directory
        address = config.buffer.address or f"ipc://{private}/buffer"
        return Supervisor(config, run_dir, LocalSpawner(config, run_dir, address, private)).run()
    finally:
        for one in claims:
            one.remove()
        with suppress(OSError):  # of actors that were killed
            sweep(Path(config.weights.dir))
