"""Sections about a run as a whole: directory, model, stages, evaluations, checkpoints, metrics."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from evolver_async.config.values.rules import (
    Count,
    FilePath,
    Fraction,
    ImportPath,
    Pattern,
    Positive,
    PositiveFraction,
    Range,
    Scope,
)
from evolver_async.splits import Split

RunName = Annotated[str, Pattern(r"(?!\.{1,2}$)[^/\\\0]*", "a plain directory name")]
Hardware = Annotated[
    str, Pattern(r"([1-9]\d*x[1-9]\d*GB)?", "GPUs x memory of each, such as 8x80GB")
]
Tag = Annotated[str, Pattern(r".{1,64}", "a text of 1 to 64 characters")]


@dataclass
class RunConfig:
    """The run directory and the seed."""

    name: RunName = ""  # "" names the run after the recipe and the time
    dir: str = "runs"  # the run directory is <dir>/<name>
    seed: int = 0  # every random draw is keyed by the seed and by the purpose of the draw
    hardware: Hardware = ""  # GPUs that the recipe is written for; `doctor` compares them
    # mean length of an episode as a share of policy.max_length, with which `doctor` counts hours
    expected_length: PositiveFraction = 0.25


@dataclass
class LoraConfig:
    """Low-rank adapters. With them, only adapters are trained, published and checkpointed."""

    rank: int = 0  # of the adapters; 0 trains the whole model
    alpha: Positive = 16.0  # the adapters' product is scaled by alpha / rank
    # last parts of the names of linear layers, such as q_proj; none: all of the decoder's layers
    targets: list[str] = field(default_factory=list)


@dataclass
class PolicyConfig:
    """The model that is trained."""

    # a Hugging Face causal-LM directory, a .gguf file, which the run converts into one, or the id
    # of a hub (`organisation/name`); "" makes the `tiny` preset in the run directory
    path: Annotated[str, FilePath(hub=True), Scope.RUN] = ""
    download: Annotated[bool, Scope.RUN] = False  # id of a hub: download what the local cache lacks
    # id of a hub: branch, tag or commit, "" for its main branch; a run keeps the commit
    revision: Annotated[str, Scope.RUN] = ""
    hidden_size: Count = 64  # tiny preset only, as are the next three
    layers: Count = 2
    heads: Count = 4
    intermediate_size: Count = 192
    # tokens of context: prompt, actions and observations together
    max_length: Annotated[int, Range(ge=2), Scope.STAGE] = 1024
    # bfloat16 rounds, on a GPU, all weights and activations, on a CPU the inputs and weights of the
    # layers' linear maps alone. auto: for a pretrained model bfloat16 on GPUs, and on a CPU that is
    # 1.5 times as fast with it; else float32. The run's config.yaml says which was chosen
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def decided_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of numbers; float32 as long as nothing has decided for `auto`."""
        return "float32" if self.dtype == "auto" else self.dtype


@dataclass
class StageConfig:
    """One stretch of training. It ends at the first of its limits (0 = no such limit)."""

    kind: Annotated[
        Literal["sft", "text", "world_model", "reflect", "reward_model", "dpo", "kto", "rl"],
        Scope.RUN | Scope.REPLAY,
    ] = "rl"
    steps: int = 0  # learner steps
    # passes over the rows of `data`; a run's config.yaml has the steps that they take
    epochs: float = 0.0
    tokens: int = 0  # trained ACTION tokens
    hours: float = 0.0
    until_success: Fraction = 0.0  # the newest eval/success reaches this value
    # sft: share of demonstrations by the environment's solver; the others are random
    expert_fraction: Fraction = 1.0
    # world_model, reflect: actions that are tried beside the expert's in each state
    alternatives: Count = 3
    # start the stage with a fresh optimizer
    reset_optimizer: Annotated[bool, Scope.RUN | Scope.LEARNER] = False
    # start the stage with the current policy as the KL reference
    refresh_reference: Annotated[bool, Scope.RUN | Scope.LEARNER] = False
    # keys of other sections, for this stage only; keys of the whole run are refused
    override: dict[str, Any] = field(default_factory=dict)


SUPERVISED = ("sft", "text", "world_model", "reflect")  # kinds without a policy's own episodes
BRANCHED = ("world_model", "reflect")  # kinds that try other actions beside the expert's
PAIRED = ("reward_model", "dpo")  # kinds that compare a better conversation with a worse one
PREFERENCES = (*PAIRED, "kto")  # kinds that learn which conversations are better, or good


def limits_reached(
    stage: StageConfig, *, steps: int, tokens: int, seconds: float, success: float
) -> list[str]:
    """Return the keys of the limits that a stage with these totals has reached."""
    reached = {
        "steps": 0 < stage.steps <= steps,
        "tokens": 0 < stage.tokens <= tokens,
        "hours": 0 < stage.hours * 3600 <= seconds,
        "until_success": 0 < stage.until_success <= success,
    }
    return [key for key, over in reached.items() if over]


@dataclass
class EvalSetEnvConfig:
    """The environment of a set of evaluation episodes."""

    name: str = ""  # "": that of the stage
    # the environment's own parameters; with name "" those that differ from the stage's
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalSetConfig:
    """One further set of evaluation episodes: `k` samples of each of `tasks` tasks."""

    env: EvalSetEnvConfig = field(default_factory=EvalSetEnvConfig)
    split: Literal["auto", Split] = "auto"  # auto: that of the run's own evaluations
    first: int = 0  # number of the first task in the split
    tasks: Count = 64
    k: Count = 1  # samples per task; more than one needs a temperature
    temperature: float = 0.0  # 0 is greedy
    guided: bool = False  # with what the experience service finds, as guided members of training
    # versions between evaluations of the set, a multiple of eval.every; 0: with every evaluation
    every: int = 0


FINAL_SET = "test"  # name of the set of the split test that is evaluated at the end of a run


@dataclass
class EvalConfig:
    """Evaluation on held-out tasks with exact weights, greedy and without experience (but for sets
    that ask for it)."""

    # evaluate the model as it is before the first step, as step 0 of every curve; auto: always
    # with policy.path, never the tiny preset
    at_start: Literal["auto", "always", "never"] = "auto"
    # versions between evaluations, and steps between those of rows; 0: only after each stage
    every: int = 25
    # of the run's own evaluations, by which checkpoint.keep_best, until_success, rollback and a
    # study's best decide; auto: validation, of rows without one test
    split: Literal["auto", Split] = "auto"
    episodes: int = 256  # 0: there are no evaluations but those of rows
    # rows of the validation split of `data` that a stage which learns rows is measured on, always
    # the same ones; 0: none
    rows: int = 256
    # tasks of the split test, evaluated after the last stage alone as eval/test/…; 0: none, and
    # none where test decides
    final_episodes: int = 512
    temperature: float = 0.0
    # time without progress after which the last evaluation is lost (exit code 4)
    timeout_s: Positive = 120.0
    # further sets by name; their results are eval/<name>/… and decide nothing
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)


@dataclass
class CheckpointConfig:
    """Checkpoints in <run>/checkpoints, the newest last."""

    every: Count = 25  # learner steps; one is also written at the end of a stage and on SIGTERM
    # also after so many since the last one, at the end of a step; 0: by steps alone
    minutes: Annotated[float, Range(ge=0)] = 0.0
    keep: Annotated[int, Range(ge=2)] = 2  # the newest ones
    # in addition, those with the highest eval/success, and an evaluated one of step 0; 0: none
    keep_best: int = 1
    keep_every: int = 0  # in addition and for good, those of every n-th step; 0: none


@dataclass
class MetricsConfig:
    """JSONL files always; Weights & Biases on request."""

    # auto: online with an API key, else offline
    wandb: Literal["auto", "online", "offline", "disabled"] = "disabled"
    project: str = "evolver-async"
    # user or team of W&B; "": as WANDB_ENTITY says, else W&B's default
    entity: Annotated[str, Pattern(r"[^/\s]{0,128}", "a user or a team of W&B, or empty")] = ""
    # of runs at W&B; "": as WANDB_RUN_GROUP says
    group: Annotated[str, Pattern(r".{0,128}", "at most 128 characters")] = ""
    # of the run at W&B; "": as WANDB_JOB_TYPE says
    job_type: Annotated[str, Pattern(r".{0,64}", "at most 64 characters")] = ""
    tags: list[Tag] = field(default_factory=list)  # of the run at W&B
    notes: str = ""  # about the run, for its page at W&B
    # functions package.module:function of one's own, which get every row of metrics.jsonl
    sinks: list[ImportPath] = field(default_factory=list)
    samples: int = 2  # trajectories written to <run>/samples every `samples_every` rl steps
    samples_every: Count = 10
    # of <run>/samples; beyond it the files that were written first go, the newest one stays
    samples_bytes: Annotated[int, Range(ge=1 << 20)] = 1 << 30
    # auto: a live panel on a terminal, else lines
    panel: Literal["auto", "panel", "lines", "none"] = "auto"
    # host:port at which the launcher serves STATUS and the newest metrics to Prometheus
    prometheus: Annotated[str, Pattern(r"|[^\s/]+:\d{1,5}", "host:port")] = ""
