"""The sections of AgentEvolver's three mechanisms, and of reflection, which asks models as well."""

from dataclasses import dataclass, field


@dataclass
class Llm:
    """An OpenAI-compatible endpoint, and how much of it may be used (0 = without limit)."""

    url: str = ""  # up to and including /v1
    model: str = ""
    key_env: str = ""  # the environment variable that holds its key; "" sends none
    timeout_s: float = 60.0  # of one call
    retries: int = 3  # of a call that failed, with growing pauses
    concurrency: int = 8  # calls in flight, of one process
    max_tokens: int = 2048  # of one answer
    max_bytes: int = 1 << 20  # of one answer: a longer one is a failure
    breaker_failures: int = 5  # failed calls in a row after which it is left alone
    breaker_s: float = 30.0  # for so long
    budget_calls: int = 0  # of one process, as are the next two
    budget_tokens: int = 0  # read and written
    budget_s: float = 0.0  # seconds of calls


@dataclass
class Experience:
    """Self-Navigating: what earlier groups found out guides some members of later ones."""

    kind: str = "none"  # none, contrast (where members of a group diverged) or llm (an endpoint)
    strip: str = "always"  # the learner drops experience from prompts: always, never or fraction
    strip_fraction: float = 0.5  # fraction: of the guided trajectories
    embedder: str = "hash"  # hash (n-grams) or the directory of a sentence-transformers model
    dimensions: int = 256  # hash: of a vector
    top_k: int = 5  # entries that guide an episode
    similarity: float = 0.5  # least cosine of an entry's when_to_use with the task
    dedup: float = 0.0  # cosine over which an entry is there already; 0: 0.95 for hash, else 0.5
    least_score: float = 0.5  # of a new entry, by its validation
    capacity: int = 10_000  # entries; the least useful go
    per_source: int = 5_000  # entries of one contributor
    retire_uses: int = 8  # entries used so often ...
    retire_utility: float = 0.1  # ... with less than this success per use are retired
    max_chars: int = 2_000  # of the guidance of one episode
    timeout_s: float = 2.0  # without an answer by then an episode goes unguided
    rewrite: bool = False  # llm: have the entries found made into one text for the task
    address: str = ""  # ipc:// or tcp:// address; "" makes an ipc socket beside the buffer's
    llm: Llm = field(default_factory=Llm)


@dataclass
class Judge:
    """Self-Attributing: who labels the turns of a finished episode GOOD or BAD.

    `self` keeps to the concurrency and the budgets of `llm`, too.
    """

    kind: str = "none"  # none, rule (the environment's score), self (the policy) or llm
    max_chars: int = 2_000  # of an action, and of an observation, that the judge reads
    max_tokens: int = 1024  # self: of its answer
    timeout_s: float = 90.0  # of the labels of one trajectory, retries and waiting included
    cache: int = 4096  # judgements kept
    llm: Llm = field(default_factory=Llm)


@dataclass
class Reflection:
    """Early experience: who writes why an expert's turn is better than another that was tried."""

    kind: str = "template"  # template (from what both led to) or llm (an endpoint)
    timeout_s: float = 60.0  # of one reason, retries included; then the template writes it
    llm: Llm = field(default_factory=Llm)


@dataclass
class Questioning:
    """Self-Questioning: tasks that the system sets itself."""

    kind: str = "none"  # none, goals (states that exploration reached) or llm (an endpoint)
    profile: str = ""  # llm: a JSON file that describes the environment; "" its own instructions
    every: int = 8  # rollout groups for one group of exploration
    groups: int = 4  # exploration groups at a time
    max_tasks: int = 10_000  # in the pool; then exploration ends
    per_episode: int = 4  # tasks made of one explorer's episode, at most
    temperature: float = 1.0  # of exploration
    max_turns: int = 30  # of exploration
    breadth: int = 3  # turns of exploration that look around before it goes deep
    depth: int = 8  # observations that it sees while it goes deep
    jaccard: float = 0.8  # word sets this alike are the same task
    similarity: float = 0.95  # cosine from which two tasks are the same
    replays: int = 3  # of a reference, beside that with the dynamics it was found with ...
    replays_kept: int = 2  # ... of which so many must succeed
    resolve: bool = False  # llm: keep only what it solves again with the reference as a hint
    llm: Llm = field(default_factory=Llm)
