"""The questioner that a configuration asks for."""

from actors.failures import FailureCounts
from actors.llm.client import Endpoint
from actors.llm.json_client import JsonClient
from actors.questioning.questioner import Questioner
from evolver_async.config import Config


def make_questioner(config: Config, failures: FailureCounts | None = None) -> Questioner | None:
    """Make the configured questioner; None if `questioning.kind` is none."""
    match config.questioning.kind:
        case "none":
            return None
        case "llm":
            endpoint = Endpoint(config.questioning.llm, "questioning", failures)
            return Questioner(config, JsonClient(endpoint), failures)
    return Questioner(config, None, failures)
