"""Choice of the configured judge, and whether it is audited."""

from actors.engines.engine import Engine
from actors.failure_counts import FailureCounts
from actors.formats.chat import Chat
from actors.judge.audit import AuditedJudge
from actors.judge.judge import Judge, ModelJudge, RuleJudge
from actors.judge.own_judge import OwnJudge
from actors.llm.endpoint_client import Endpoint
from actors.llm.self_client import PolicyClient
from evolver_async.config import Config, ConfigError
from evolver_async.extension import implementation, is_own


def make_judge(
    config: Config, engine: Engine, chat: Chat, failures: FailureCounts | None = None
) -> Judge | None:
    """Make the configured judge; None if `judge.kind` is none. Raise ConfigError if a key is
    missing, or an own function makes no judge."""
    kind, probes = config.judge.kind, config.judge.probes
    if kind == "none":
        return None
    make = implementation("judge.kind", kind, JUDGES)
    failures = failures or FailureCounts()
    judge = make(config, engine, chat, failures)
    if is_own(kind):
        if not isinstance(judge, Judge):
            raise ConfigError(f"judge.kind: {kind} returned {type(judge).__name__}, not a Judge")
        judge = OwnJudge(judge, timeout_s_of(config), failures)
    return AuditedJudge(judge, probes) if probes and config.judge.audited else judge


def timeout_s_of(config: Config) -> float | None:
    """Return the limit of a judge of one's own.

    A serial run has none: its virtual clock would run past it while a thread works.
    """
    return None if config.launch.kind == "serial" else config.judge.timeout_s


def rule_judge(config: Config, engine: Engine, chat: Chat, failures: FailureCounts) -> Judge:
    """Make the judge by the environment's score."""
    return RuleJudge()


def self_judge(config: Config, engine: Engine, chat: Chat, failures: FailureCounts) -> Judge:
    """Make the judge that asks the policy."""
    return ModelJudge(config.judge, PolicyClient(config, engine, chat), failures)


def llm_judge(config: Config, engine: Engine, chat: Chat, failures: FailureCounts) -> Judge:
    """Make the judge that asks an endpoint."""
    return ModelJudge(config.judge, Endpoint(config.judge.llm, "judge", failures), failures)


JUDGES = {"rule": rule_judge, "self": self_judge, "llm": llm_judge}
