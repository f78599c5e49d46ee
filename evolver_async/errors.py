"""Exit codes of a process, and the errors that end one for good."""

# Exit codes of ends that starting again would only repeat.
USER_ERROR = 2
TRAINING_ERROR = 3
EVALUATION_LOST = 4  # all was trained and written, but an evaluation stood still


class Unrecoverable(Exception):
    """An error that a restart would repeat. The message names the key, file or peer to change."""


class TrainingError(RuntimeError):
    """Training cannot usefully continue, even after a restart. The message says why."""
