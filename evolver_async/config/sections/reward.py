"""Section about the reward: its terms, and the success of an episode."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from evolver_async.config.sections.agentevolver import LlmConfig
from evolver_async.config.values.rules import (
    Count,
    FilePath,
    Open,
    Pattern,
    Positive,
    Scope,
    Signed,
    Variable,
)

OF_ANSWERS = ("exact", "number", "math", "llm")  # terms that compare the reply with an answer
OF_TEXTS = ("regex", "code")
OF_COSTS = ("length", "tool_calls", "tokens", "seconds")
OF_ENV = ("env", "success")
REWARD_MODEL = "reward_model"  # the term that scores a whole conversation by a model
TermName = Annotated[str, Open(*OF_ANSWERS, *OF_TEXTS, *OF_COSTS, *OF_ENV, REWARD_MODEL)]
SUCCESS_RULES = ("auto", "env", "total")  # beside the labels of terms


@dataclass
class TermConfig:
    """One term of the reward."""

    # a built-in term, or a function of one's own with TRL's signature
    name: TermName = "env"
    weight: Signed = 1.0
    # its name in metrics; "": the name, of an own function what follows the colon
    label: Annotated[str, Pattern(r"([A-Za-z_][\w.-]*)?", "a name")] = ""
    params: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the term

    @property
    def called(self) -> str:
        """Return the name of the term in metrics."""
        return self.label or self.name.rpartition(":")[2]


@dataclass
class ScoringModelConfig:
    """The reward model of a term: a directory, a server, or without both the run's own one."""

    # directory for AutoModelForSequenceClassification with one label; with the policy's tokenizer
    # it reads an episode's tokens, else messages by its own chat template. Without path and url
    # the term takes what the newest stage of kind reward_model before has trained
    path: Annotated[str, FilePath()] = ""
    # of a server that answers POST {"model": name, "messages": […]} as vLLM's /classify and
    # /pooling do, or by {"score": number}
    url: Annotated[str, Pattern(r"(https?://\S+)?", "an http(s) URL")] = ""
    name: str = ""  # of the model at the server
    key_env: Variable = ""  # environment variable that holds the API key; "" sends none
    # after a status of 5xx or 429, or no answer within reward.timeout_s; with growing pauses
    retries: int = 3


@dataclass
class RewardConfig:
    """The reward of an episode: the weighted sum of its terms, and penalties of `rollout`.

    The short forms `reward: [math, "my_rewards:brief"]` and `reward=[math]` give the terms alone.
    """

    # in training and evaluations alike; the environment's own reward counts with weight 1 unless a
    # term `env` gives another
    terms: Annotated[list[TermConfig], Scope.STAGE] = field(default_factory=list)
    # success of an episode: env (the environment's own), total (the reward reaches the threshold),
    # or the label of a term that reaches it. auto: env; for env.name=prompts, which has none, the
    # first term with a weight above 0
    success: str = "auto"
    threshold: Signed = 1.0  # of the term, without its weight, or of the total
    workers: Count = 2  # processes of an actor for own functions, math and regex
    timeout_s: Positive = 30.0  # of one term of one episode; of one try at reward.model.url
    llm: LlmConfig = field(default_factory=LlmConfig)  # the endpoint of terms named llm
    # that of terms named reward_model
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)

    @property
    def kind(self) -> str:
        """Return llm if a term asks an endpoint."""
        return "llm" if any(term.name == "llm" for term in self.terms) else "none"

    @property
    def first(self) -> str:
        """Return the label of the first term that measures the answer, "" if there is none."""
        answering = (t for t in self.terms if t.weight > 0 and t.name not in (*OF_ENV, *OF_COSTS))
        return next((term.called for term in answering), "")


def expanded(section: Any) -> Any:
    """Return the section as a mapping with terms as mappings: both have short forms."""
    if isinstance(section, str | list):
        section = {"terms": section}
    if not isinstance(section, dict) or "terms" not in section:
        return section
    terms = section["terms"]
    if isinstance(terms, str):
        terms = [terms]
    if isinstance(terms, list):
        terms = [{"name": one} if isinstance(one, str) else one for one in terms]
    return section | {"terms": terms}
