"""Sections of AgentEvolver's three mechanisms and of reflection, which calls models as well."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from evolver_async.config.sections.rollout import Turns
from evolver_async.config.values.rules import (
    Count,
    FilePath,
    Fraction,
    Open,
    Positive,
    PositiveFraction,
    Range,
    Scope,
    Variable,
)
from evolver_async.extension import is_own

SUMMARISED = "auto"  # as questioning.profile: the model makes one
LLM_SECTIONS = ("experience", "judge", "questioning", "reflection", "reward")  # have endpoints


@dataclass
class LlmConfig:
    """An OpenAI-compatible endpoint and its budget (0 = without limit)."""

    url: str = ""  # up to and including /v1
    model: str = ""
    key_env: Variable = ""  # environment variable that holds the API key; "" sends none
    timeout_s: Positive = 60.0  # of one call
    retries: int = 3  # of a failed call, with growing pauses
    concurrency: Count = 8  # calls in flight per process
    max_tokens: Count = 2048  # of one answer
    max_bytes: Count = 1 << 20  # of one answer: a longer one is a failure
    breaker_failures: Count = 5  # consecutive failures after which no calls are made ...
    breaker_s: float = 30.0  # ... for this time
    budget_calls: int = 0  # per process, as are the next two; 0 is no limit
    budget_tokens: int = 0  # of prompts and answers
    budget_s: float = 0.0  # seconds of calls


@dataclass
class EmbeddingConfig:
    """An OpenAI-compatible endpoint of vectors (`POST <url>/embeddings`)."""

    url: str = ""  # up to and including /v1
    model: str = ""
    key_env: Variable = ""  # environment variable that holds the API key; "" sends none
    # of one call, during which the experience service, or an actor with questioning, waits
    timeout_s: Positive = 5.0
    max_bytes: Count = 1 << 24  # of one answer: a longer one is a failure
    breaker_failures: Count = 3  # consecutive failures after which no calls are made ...
    breaker_s: float = 30.0  # ... for this time


@dataclass
class ExperienceConfig:
    """Self-Navigating: lessons of earlier groups guide some members of later ones."""

    # contrast compares members of a group where they diverged; llm asks an endpoint
    kind: Annotated[str, Open("none", "contrast", "llm")] = "none"
    params: dict[str, Any] = field(default_factory=dict)  # of a backend of one's own
    # llm: the model first says which episodes teach nothing: off the task, repeating themselves, or
    # claiming what they did not do
    vet: bool = False
    # guided trajectories train in the context that they were sampled in (none), without its
    # experience (strip), or in that context while it teaches the one without experience (distill)
    internalise: Annotated[Literal["none", "strip", "distill"], Scope.LEARNER] = "strip"
    # strip: share of the guided trajectories that lose their experience
    strip_fraction: Annotated[PositiveFraction, Scope.LEARNER] = 1.0
    # distill: weight of the KL from the guided context
    distill_coef: Annotated[Positive, Scope.LEARNER] = 1.0
    # distill: trajectories whose guided context teaches: all that were sampled in it (guided), the
    # successful ones of them (solved), or those of guided members that were sampled without their
    # experience (bare); the KL is the reverse one for bare, else the forward one
    distill_on: Annotated[Literal["guided", "solved", "bare"], Scope.STAGE] = "guided"
    # distill: the teacher, the policy of the update, or the reference: the one at the beginning of
    # the run's first rl stage, or of the newest with refresh_reference
    distill_teacher: Annotated[Literal["policy", "reference"], Scope.LEARNER] = "policy"
    # distill: weight of the stage's own loss beside it; 0: distillation alone
    loss_coef: Annotated[float, Scope.LEARNER] = 1.0
    # strip: advantages are multiplied by exp(-this * reliance), the log-prob per token that the
    # experience was worth; 0: no weights
    reliance_coef: Annotated[float, Scope.LEARNER] = 0.0
    # a guided trajectory keeps its context if an action copies so many consecutive characters that
    # only the experience holds; 0: none does
    keep_copied: Annotated[int, Scope.LEARNER] = 0
    # entries tell what one group found (instance), or what several similar tasks have in common
    # (principle)
    granularity: Literal["instance", "principle"] = "instance"
    # an episode is guided once, for its task (episode), or before every turn, for what the turn
    # observes (step)
    injection: Literal["episode", "step"] = "episode"
    # the pool is emptied when the first group of the stage is contributed
    renew: Annotated[bool, Scope.STAGE] = False
    # hash (n-grams), endpoint (that of experience.embedding), a sentence-transformers directory, or
    # package.module:function of a list of texts that returns one vector a text; also for
    # questioning's filter
    embedder: Annotated[str, FilePath(but=("hash", "endpoint"), own=True)] = "hash"
    dimensions: Annotated[int, Range(ge=8)] = 256  # hash: of a vector
    top_k: Count = 5  # entries that guide an episode, or a turn
    similarity: Fraction = 0.5  # least cosine between an entry's when_to_use and the task
    # cosine above which a new entry is a duplicate; 0: 0.95 for hash, else 0.5
    dedup: Fraction = 0.0
    least_score: Fraction = 0.5  # least validation score of a new entry
    capacity: Count = 10_000  # entries; the least useful are removed
    per_source: Count = 5_000  # entries of one contributor
    retire_uses: int = 8  # uses of an entry ...
    # ... after which it is retired if its success per use (with one success in two uses added) is
    # below this share of the success of unguided members in the same groups
    retire_utility: Fraction = 0.1
    max_chars: Count = 2_000  # of the guidance of one episode, or of a turn
    timeout_s: Positive = 2.0  # without an answer by then an episode is not guided
    rewrite: bool = False  # llm: merge the retrieved entries into one text for the task
    address: str = ""  # ipc:// or tcp:// address; "" makes an ipc socket beside the buffer's
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    llm: LlmConfig = field(default_factory=LlmConfig)

    @property
    def by_reference(self) -> bool:
        """True if the reference teaches the contexts without experience."""
        distills = self.kind != "none" and self.internalise == "distill"
        return distills and self.distill_teacher == "reference"

    @property
    def pooled(self) -> bool:
        """True if the run has an experience service, with a pool of its own."""
        return self.kind in ("contrast", "llm")

    @property
    def loads_embedder(self) -> bool:
        """True if `embedder` is the directory of a model."""
        return self.embedder not in ("hash", "endpoint") and not is_own(self.embedder)


@dataclass
class JudgeConfig:
    """Self-Attributing: labels GOOD or BAD for the turns of a finished episode.

    `self` is subject to the concurrency and the budgets of `llm`, too.
    """

    # rule uses the environment's score, self asks the policy, llm asks an endpoint
    kind: Annotated[str, Open("none", "rule", "self", "llm")] = "none"
    params: dict[str, Any] = field(default_factory=dict)  # of a judge of one's own
    max_chars: Count = 2_000  # of an action, and of an observation, in the judge's prompt
    # rollout.agent_reward=judged: of all texts of a group in its prompt; the shared task and last
    # messages have room first, and what is longer is cut in its middle
    group_chars: Count = 48_000
    max_tokens: Count = 512  # self: of its answer, beside the question in policy.max_length
    timeout_s: Positive = 90.0  # of the labels of one trajectory, retries and waiting included
    cache: int = 4096  # cached judgements
    # self, llm and own judges: probes with known labels per judged episode; for self and llm also
    # the share of episodes whose turns are compared with the environment's score, if it has one
    # (all of them for own judges)
    probes: Fraction = 0.02
    llm: LlmConfig = field(default_factory=LlmConfig)

    @property
    def audited(self) -> bool:
        """True if labels are opinions, which probes measure: neither off nor computed."""
        return self.kind not in ("none", "rule")


@dataclass
class ReflectionConfig:
    """Early experience: reasons why an expert's turn is better than a tried alternative."""

    kind: Literal["template", "llm"] = "template"  # template writes from both outcomes
    timeout_s: Positive = 60.0  # of one reason, retries included; then the template writes it
    llm: LlmConfig = field(default_factory=LlmConfig)


@dataclass
class QuestioningConfig:
    """Self-Questioning: synthetic tasks from exploration of the environment."""

    # goals takes states that exploration reached as tasks; llm asks an endpoint
    kind: Literal["none", "goals", "llm"] = "none"
    # llm: a JSON file that describes the environment, or auto, with which the model describes it by
    # what an agent is shown first; "" its own instructions
    profile: Annotated[str, FilePath(but=(SUMMARISED,))] = ""
    obeys_profile: bool = False  # llm: keep only tasks that obey the profile, as the model finds
    every: Count = 8  # rollout groups per group of exploration
    groups: Count = 4  # exploration groups at a time
    max_tasks: Count = 10_000  # of a stage in the pool; then exploration ends
    # tasks of the pool that no group was played of: as long as it has so many, nothing explores
    max_untried: Count = 64
    per_episode: Count = 4  # most tasks from one exploration episode
    temperature: Positive = 1.0  # of exploration
    max_turns: Turns = 30  # of exploration
    breadth: int = 3  # first turns of exploration, which look around before it goes deep
    depth: Count = 8  # observations in the prompt while it goes deep
    jaccard: Fraction = 0.8  # word overlap from which two tasks are the same
    similarity: Fraction = 0.95  # cosine from which two tasks are the same
    replays: Count = 3  # of a reference, in addition to the one with its original dynamics ...
    replays_kept: int = 2  # ... and how many of them must succeed
    resolve: bool = False  # llm: keep only tasks that it solves again with the reference as a hint
    llm: LlmConfig = field(default_factory=LlmConfig)
