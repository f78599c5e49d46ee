"""Exit codes of a process, and the errors after which it is not restarted."""

DISK_FAILED = 8  # a sync or a write failed on the device itself
DISK_FULL = 6  # a process found no room on a disk: it is started again, as often as needed
UNPLACED = 9  # a process finds no place for the moment: it is started again, as often as needed
STOPPED = 5  # a learner that was asked to stop and saved what it has: it can be started again

# Exit codes of errors that a restart would repeat.
USER_ERROR = 2
TRAINING_ERROR = 3
EVALUATION_LOST = 4  # training is complete and saved, but an evaluation made no progress


class Inconsistency(AssertionError):
    """State that contradicts itself. It is raised and not asserted, as PYTHONOPTIMIZE removes what
    is asserted: a process that went on would write wrong data."""


class Unrecoverable(Exception):
    """An error that a restart would repeat. The message names the key, file or peer to change."""


class TrainingError(RuntimeError):
    """Training cannot usefully continue, even after a restart. The message says why."""
