"""Memory plan: the bytes of every process of a run, by part, as they are at its peak.

Private bytes are those that nothing can reclaim (anonymous memory); pages of libraries and files
are not counted. GPU bytes exclude CUDA's own context. Activations are those of a pass that fills
`learner.token_budget`: a run with shorter episodes needs less.

A key in brackets behind a part is the one to change.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.sections.reward import REWARD_MODEL
from evolver_async.config.sections.weight_channel import channel, versions_kept
from evolver_async.config.shape import DecoderShape, shape_of, teacher_shape
from evolver_async.memory.bounds import MAX_COPIED
from evolver_async.memory.units import DTYPE_BYTES, FLOAT, MIB, stored
from evolver_async.memory.vllm_limits import cpu_kv_bytes
from evolver_async.model.logit_chunks import chunk_tokens

PREFILL = "prefill"  # held while an engine computes: in a serial run one at a time
MERGED = "merged weights"  # of an engine on a CPU
LOADING = "weights on their way to the GPU"  # likewise, while an engine begins

# Anonymous memory of a process before its model, in bytes: docs/findings.md, "Memory, predicted".
BASES = {
    "learner": 290 * MIB,
    "actor": 290 * MIB,
    "buffer": 35 * MIB,
    "experience": 35 * MIB,
    "launcher": 46 * MIB,
}
VLLM_BASES = 1150 * MIB  # with one worker; each further one adds half of it


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one purpose in a process; `key`: what to change for less."""

    name: str
    size: float
    key: str
    gpu: bool = False


@dataclass(frozen=True)
class ProcessPlan:
    """Parts of one kind of process, of which `count` run."""

    role: str
    count: int
    parts: tuple[MemoryPart, ...]

    @property
    def private(self) -> float:
        """Host bytes of one process."""
        return sum(part.size for part in self.parts if not part.gpu)

    @property
    def gpu(self) -> float:
        """GPU bytes of one process."""
        return sum(part.size for part in self.parts if part.gpu)


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of all processes of one host; `shared`: files in `weights.dir`."""

    processes: tuple[ProcessPlan, ...]
    shared: float

    @property
    def private(self) -> float:
        return sum(one.count * one.private for one in self.processes)

    @property
    def host(self) -> float:
        """Host bytes of everything, the files in memory included."""
        return self.private + self.shared

    def largest(self) -> MemoryPart:
        """The part that takes the most host memory over all processes and has a key."""
        parts = [(one.count * part.size, part) for one in self.processes for part in one.parts]
        totals = [replace(part, size=size) for size, part in parts if part.key and not part.gpu]
        return max(totals, key=lambda part: part.size)


def memory_plan(
    config: Config, shape: DecoderShape, *, learner_gpu: bool, actor_gpu: bool
) -> MemoryPlan:
    """Plan a run. `learner_gpu`, `actor_gpu`: these processes compute on GPUs."""
    rounds = config.policy.dtype == "bfloat16"
    acting, config = stored(config, actor_gpu), stored(config, learner_gpu)
    stages = [stage_config(config, index) for index in range(len(config.stages))]
    parts = tuple(_learner(config, stages, shape, learner_gpu))
    if rounds and not learner_gpu and config.learner.ranks == 1:
        kept = [one for one in parts if one.name in ("weights", "KL reference", "critic")]
        parts += (_rounded(shape, sum(one.size > 0 for one in kept)),)
        if (teacher := largest_teacher(stages)) is not None:
            parts += (_rounded(teacher, 1),)
    learner = ProcessPlan("learner", config.learner.ranks_per_host, parts)
    actors = config.actors.bounds()[1]
    of_actor = tuple(_actor(acting, stages, shape, actor_gpu))
    if rounds and not actor_gpu and config.engine.kind == "torch":
        of_actor = *(one for one in of_actor if one.name != MERGED), _rounded(shape, 1)
    actor = ProcessPlan("actor", actors, of_actor)
    buffer = [_base("buffer"), MemoryPart("groups", _groups_bytes(stages), "buffer.limit_bytes")]
    others = [ProcessPlan("buffer", 1, tuple(buffer))]
    if config.launch.kind == "serial":
        counts = [1 if one.name in (PREFILL, LOADING) else actors for one in actor.parts]
        engines = [replace(x, size=n * x.size) for x, n in zip(actor.parts, counts, strict=True)]
        own = [*_experience(config)][1:] if config.experience.pooled else []
        parts += (*engines[1:], *buffer[1:], *own)
        return MemoryPlan((ProcessPlan("launcher", 1, parts),), _shared(config, shape))
    if config.experience.pooled:
        others.append(ProcessPlan("experience", 1, tuple(_experience(config))))
    others.append(ProcessPlan("launcher", 1, (_base("launcher"),)))
    return MemoryPlan((learner, actor, *others), _shared(config, shape))


def _base(role: str) -> MemoryPart:
    return MemoryPart("process and libraries", BASES[role], "")


def _rounded(shape: DecoderShape, copies: int) -> MemoryPart:
    """Part of a process on a CPU that keeps the weights of so many decoders in bfloat16, too."""
    size = copies * DTYPE_BYTES["bfloat16"] * shape.decoder
    return MemoryPart("rounded weights", size, "policy.dtype")


def _copy(config: Config, shape: DecoderShape) -> float:
    """Bytes of one copy of the policy, as engines and files hold it."""
    return shape.parameters * DTYPE_BYTES[config.policy.decided_dtype]


def _loading(config: Config, shape: DecoderShape) -> MemoryPart:
    """Part of a whole model in host memory, before it goes to a GPU or is sharded.

    Pages of files in the wanted type can be reclaimed.
    """
    converts = shape.stored not in ("", config.policy.decided_dtype)
    return MemoryPart(LOADING, converts * _copy(config, shape), "policy.dtype")


def _published(config: Config, shape: DecoderShape) -> float:
    """Bytes of one version in a weight channel: of the adapters, else of the policy."""
    if config.policy.lora.rank:
        return FLOAT * adapter_parameters(config, shape)
    return _copy(config, shape)


def _cast(config: Config, published: float, gpu: bool) -> float:
    """Bytes of an end of a broadcast: of the versions that are kept, and of the next one.

    Memory that a GPU copies from or to is pinned; torch's allocator of it, CachingHostAllocator,
    rounds each version up to a power of two.
    """
    one = 1 << (math.ceil(published) - 1).bit_length() if gpu else published
    return (versions_kept(config) + 1) * one


def _learner(
    config: Config, stages: list[Config], shape: DecoderShape, gpu: bool
) -> Iterable[MemoryPart]:
    """Parts of one rank; with several, the first one, which also publishes."""
    ranks, shards = config.learner.ranks, config.learner.shards
    copy, adapted = _copy(config, shape), config.policy.lora.rank > 0
    trained = adapter_parameters(config, shape) if adapted else shape.parameters
    yield _base("learner")
    # Several ranks hold float32 shards; one rank on a short type holds both.
    short = copy if config.policy.decided_dtype != "float32" and ranks == 1 and not adapted else 0
    weights = (copy if adapted else FLOAT * shape.parameters) / shards + short
    if ranks > 1:
        weights += FLOAT * (shape.layer + shape.embedding)  # gathered for the pass
    yield MemoryPart("weights", weights, _model_key(config), gpu)
    own = FLOAT * trained / shards
    yield MemoryPart("gradients, moments", 3 * own, "learner.ranks", gpu)
    rl = [stages[index] for index, one in enumerate(config.stages) if one.kind == "rl"]
    if any(stage.reads_reference for stage in rl) or _kinds(config) & {"dpo", "kto"}:
        shares = adapted and ranks == 1
        yield MemoryPart("KL reference", 0 if shares else copy / shards, "loss.kl_coef", gpu)
    if (teacher := largest_teacher(stages)) is not None:
        # Ranks share its layers, and each has the head.
        head = DTYPE_BYTES[config.policy.decided_dtype] * teacher.embedding if ranks > 1 else 0
        yield MemoryPart("teacher", _copy(config, teacher) / shards + head, "teacher.path", gpu)
    if any(stage.advantage.facts.critic for stage in rl):
        yield MemoryPart("critic", _critic(config, shape), "critic.kind", gpu)
    if "reward_model" in _kinds(config):
        size = _whole(config, _reward_shape(config, shape))
        yield MemoryPart("reward model", size, "reward_model.path", gpu)
    largest = max(stages, key=lambda stage: stage.learner.token_budget)
    layer, inputs = activation_bytes(largest, shape)
    offloads = gpu and config.learner.offload_activations
    kept = layer + inputs * (not offloads)
    yield MemoryPart("activations", kept, "learner.token_budget", gpu)
    if offloads:
        yield MemoryPart("offloaded activations", inputs, "learner.offload_activations")
    logits = logits_bytes(config, shape, gpu)
    yield MemoryPart("logits", logits, "learner.logprob_chunk", gpu)
    if gpu:  # moments on their way to the file, long after the weights have come
        moments = MemoryPart("checkpoint being written", 2 * own, "learner.ranks")
        yield max(moments, _loading(config, shape), key=lambda part: part.size)
    published = _published(config, shape)
    if channel(config) == "cuda_ipc" and not adapted:
        held = versions_kept(config) * published
        yield MemoryPart("published weights", held, "weights.kind", gpu)
        return
    if gpu and channel(config) == "shm":  # a GPU copies to the file itself
        return
    gathered = published if ranks > 1 else 0
    held = _cast(config, published, gpu) if channel(config) == "collective" else published
    yield MemoryPart("published weights", held + gathered, "weights.kind")


def largest_teacher(stages: list[Config]) -> DecoderShape | None:
    """Return the shape of the largest teacher of these stages, of which one is held at a time."""
    shapes = [shape for stage in stages if (shape := teacher_shape(stage)) is not None]
    return max(shapes, key=lambda shape: shape.parameters, default=None)


def _critic(config: Config, shape: DecoderShape) -> float:
    """Bytes of a critic on one rank; its head alone counts as nothing.

    With adapters it trains its own; only a single rank shares the frozen weights with the policy.
    """
    if config.critic.kind == "shared":
        return 0
    ranks, copy = config.learner.ranks, shape.decoder * DTYPE_BYTES[config.policy.decided_dtype]
    if config.policy.lora.rank:
        frozen = copy if ranks > 1 else 0
        return (frozen + 4 * FLOAT * adapter_parameters(config, shape)) / config.learner.shards
    return _whole(config, shape)


def _whole(config: Config, shape: DecoderShape) -> float:
    """Bytes of a decoder with gradients and moments on one rank."""
    ranks, copy = config.learner.ranks, shape.decoder * DTYPE_BYTES[config.policy.decided_dtype]
    short = copy if config.policy.decided_dtype != "float32" and ranks == 1 else 0
    return 4 * FLOAT * shape.decoder / config.learner.shards + short


def _reward_shape(config: Config, shape: DecoderShape) -> DecoderShape:
    """Shape of the reward model that the learner trains; `shape`: the policy's."""
    if not (path := config.reward_model.path):
        return shape
    return shape_of(replace(config, policy=replace(config.policy, path=path))) or shape


def _actor(
    config: Config, stages: list[Config], shape: DecoderShape, gpu: bool
) -> Iterable[MemoryPart]:
    copy, vllm = _copy(config, shape), config.engine.kind == "vllm"
    yield MemoryPart("process and libraries", BASES["actor"], "actors.count")
    if vllm:
        workers = config.engine.tensor_parallel
        yield MemoryPart("vLLM's processes", VLLM_BASES * (1 + (workers - 1) / 2), "")
    # The torch engine adopts files in memory by reference; `shared` has these.
    mapped = not (vllm or gpu) and channel(config) == "shm" and not config.policy.lora.rank
    yield MemoryPart("weights", 0 if mapped else copy, _model_key(config), gpu)
    if not (vllm or gpu) and shape.parameters <= MAX_COPIED:
        yield MemoryPart(MERGED, copy, _model_key(config))
    yield MemoryPart("KV cache", kv_bytes(config, shape), _kv_key(config), gpu)
    if vllm and not gpu:  # packed beside those in use
        yield MemoryPart("staged weights", copy, "engine.tensor_parallel")
    whole_files = channel(config) == "shm" and not config.policy.lora.rank
    fetched = 0 if mapped or (gpu and whole_files) else copy  # a GPU copies from the file
    if channel(config) == "collective":
        receivers = config.engine.tensor_parallel if vllm else 1
        fetched = receivers * _cast(config, _published(config, shape), gpu)
    on_gpu = gpu and channel(config) == "cuda_ipc"
    yield MemoryPart("fetched weights", fetched, "weights.kind", on_gpu)
    model = config.reward.model
    if not model.url and any(one.name == REWARD_MODEL for s in stages for one in s.reward.terms):
        policy = replace(config.policy, path=model.path)
        scoring = shape_of(replace(config, policy=policy)) if model.path else None
        scoring = scoring or _reward_shape(config, shape)
        yield MemoryPart("reward model", FLOAT * scoring.decoder, "reward.terms")
    if config.questioning.kind == "llm":  # compares the tasks that it finds
        yield from _embedder(config)
    if not vllm:
        if gpu:
            yield _loading(config, shape)
        size = prefill_bytes(config, shape)
        yield MemoryPart(PREFILL, size, "engine.prefill_tokens", gpu)


def _experience(config: Config) -> Iterable[MemoryPart]:
    embedder = _embedder(config)
    yield _base("actor" if embedder else "experience")  # torch is imported for a model alone
    yield from embedder


def _embedder(config: Config) -> list[MemoryPart]:
    """Weights of the model that embeds texts; none for n-grams, endpoints and functions."""
    if not config.experience.loads_embedder:
        return []
    found = Path(config.experience.embedder)
    files = [*found.glob("*.safetensors")] or [*found.glob("pytorch_model*.bin")]
    size = sum(file.stat().st_size for file in files)
    return [MemoryPart("embedder", size, "experience.embedder")]


def _model_key(config: Config) -> str:
    return "policy.path" if config.policy.path else "policy.hidden_size"


def _kinds(config: Config) -> set[str]:
    return {stage.kind for stage in config.stages}


def _kv_key(config: Config) -> str:
    return "engine.kv_cache_bytes" if config.engine.kind == "vllm" else "engine.slots"


def kv_bytes(config: Config, shape: DecoderShape) -> float:
    """Bytes of an engine's KV cache on the CPU, in vLLM of all its workers."""
    if config.engine.kind == "vllm":
        return config.engine.tensor_parallel * cpu_kv_bytes(config, shape)
    columns = config.engine.slots * (config.policy.max_length + 1)
    return 2 * columns * shape.layers * shape.keys * DTYPE_BYTES[config.policy.decided_dtype]


def adapter_parameters(config: Config, shape: DecoderShape) -> int:
    """Count the parameters of all adapters, for targets of unknown names as if all were adapted."""
    sizes = {
        "q_proj": (shape.hidden, shape.queries),
        "k_proj": (shape.hidden, shape.keys),
        "v_proj": (shape.hidden, shape.keys),
        "o_proj": (shape.queries, shape.hidden),
        "gate_proj": (shape.hidden, shape.inner),
        "up_proj": (shape.hidden, shape.inner),
        "down_proj": (shape.inner, shape.hidden),
    }
    lora = config.policy.lora
    named = {target.rpartition(".")[2] for target in lora.targets}
    if not named or not named <= sizes.keys():
        named = set(sizes)
    return lora.rank * shape.layers * sum(sum(sizes[name]) for name in named)


def _groups_bytes(stages: list[Config]) -> float:
    """Bytes of the groups that the buffer holds at once, if their episodes fill the context.

    The journal has them on disk; memory keeps those of `buffer.limit_bytes` at most.
    """
    sizes = []
    for stage in stages:
        buffer, rollout = stage.buffer, stage.rollout
        groups = (buffer.max_staleness + 1) * stage.learner.groups_per_step
        per_token = 4 + 1 + 2 + 4  # token, role, turn, log-prob
        held = groups * rollout.group_size * stage.policy.max_length * per_token
        sizes.append(min(held, buffer.limit_bytes))
    return max(sizes)


def _shared(config: Config, shape: DecoderShape) -> float:
    """Bytes of files of weights in shared memory: kept versions and the one being written."""
    if channel(config) != "shm":
        return 0.0
    return (versions_kept(config) + 1) * _published(config, shape)


def activation_bytes(config: Config, shape: DecoderShape) -> tuple[float, float]:
    """Bytes that a pass over `learner.token_budget` tokens keeps for its backward pass: by layers,
    of which one is there at a time if they are recomputed, and of the inputs of those."""
    size = DTYPE_BYTES[config.policy.decided_dtype]
    tokens = config.learner.token_budget or config.policy.max_length
    layer = shape.activations * tokens * size
    if config.learner.gradient_checkpointing:
        return layer, tokens * shape.layers * shape.hidden * size
    return shape.layers * layer, 0.0


def logits_bytes(config: Config, shape: DecoderShape, gpu: bool) -> float:
    """Bytes of one chunk's logits, log-probs and their gradients, in float32, and of what sums the
    head's gradient of several chunks in float32 if the head has a short type."""
    tokens = config.learner.token_budget or config.policy.max_length
    chunk = min(chunk_tokens(config.learner.logprob_chunk, shape.vocabulary, gpu=gpu), tokens)
    summed = 0
    if chunk < tokens and config.policy.decided_dtype != "float32" and not config.policy.lora.rank:
        # the sum, what is added to it, and that as it was computed
        summed = (
            (2 * FLOAT + DTYPE_BYTES[config.policy.decided_dtype]) * shape.vocabulary * shape.hidden
        )
    return 3 * FLOAT * chunk * shape.vocabulary + summed


def prefill_bytes(config: Config, shape: DecoderShape) -> float:
    """Bytes of an engine's widest moments: in a layer of a prefill its input and its MLP's factors;
    of all slots the logits, their scaled copy, the probabilities and what draws from them. Memory
    of the one is not given back for the other."""
    wide = 3 * shape.hidden + 3 * shape.inner + shape.queries
    layer = config.engine.prefill_tokens * wide * DTYPE_BYTES[config.policy.decided_dtype]
    return layer + 4 * FLOAT * config.engine.slots * shape.vocabulary
