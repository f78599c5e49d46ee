"""Predicted memory: shapes without torch, parts of every process, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load
from evolver_async.config.shape import DecoderShape, shape_of
from evolver_async.doctor.probes.recipe import model
from evolver_async.memory import host_memory
from evolver_async.memory.host_memory import (
    _left,
    _memory_groups,
    available_bytes,
    check_memory,
    check_more_actors,
    problem_of,
)
from evolver_async.memory.plan import (
    LOADING,
    MemoryPart,
    MemoryPlan,
    ProcessPlan,
    logits_bytes,
    memory_plan,
)
from evolver_async.model.logit_chunks import LOGITS

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "configs" / "bandit.yaml"
MODELS = sorted((ROOT / "tests" / "data" / "models").iterdir())
SHAPE = DecoderShape(4, 256, 768, 4, 2, 64, 1000, tied=True, normed=True)
GIB = 1 << 30


def planned(*dotlist: str, gpu: bool = False) -> MemoryPlan:
    return memory_plan(load(RECIPE, dotlist), SHAPE, learner_gpu=gpu, actor_gpu=gpu)


def part(plan: MemoryPlan, role: str, name: str) -> float:
    (found,) = [one for one in plan.processes if one.role == role]
    return next((one.size for one in found.parts if one.name == name), 0.0)


@pytest.mark.parametrize("path", ["", *map(str, MODELS)], ids=lambda path: Path(path).name)
def test_the_shape_of_a_model_is_that_of_transformers(path: str) -> None:
    dotlist = (f"policy.path={path}",) if path else ()
    shape, found = shape_of(load(RECIPE, dotlist)), model(str(RECIPE), *dotlist).facts
    assert shape is not None
    assert shape.parameters == found["parameters"]
    assert (shape.layers, shape.hidden, shape.inner) == (
        *(found["layers"], found["hidden"], found["inner"]),
    )
    assert (shape.kv_heads, shape.head_size) == (found["kv_heads"], found["head_size"])


def test_a_directory_without_a_readable_shape_is_not_checked(tmp_path: Path) -> None:
    config = Config()
    config.policy.path = str(tmp_path)
    assert shape_of(config) is None
    check_memory(config)


def test_training_takes_sixteen_bytes_a_parameter_and_adapters_leave_four() -> None:
    whole, lora = planned(), planned("policy.lora.rank=8", "learner.minibatches=1")
    weights = 4 * SHAPE.parameters
    assert part(whole, "learner", "weights") == part(lora, "learner", "weights") == weights
    assert part(whole, "learner", "gradients, moments") == 3 * weights
    assert 0 < part(lora, "learner", "gradients, moments") < weights / 4
    assert 0 < lora.shared < whole.shared / 4


def test_a_reference_is_one_copy_and_a_separate_critic_is_trained_too() -> None:
    assert part(planned(), "learner", "KL reference") == 0
    reference = part(planned("loss.kl_coef=0.1"), "learner", "KL reference")
    assert reference == 4 * SHAPE.parameters
    critic = planned("advantage={kind: gae}", "critic.kind=separate")
    assert part(critic, "learner", "critic") == 16 * SHAPE.decoder


def test_a_teacher_is_one_copy_of_its_own_model_of_which_ranks_share_the_layers() -> None:
    path = next(path for path in MODELS if path.name == "Qwen2.5-7B-Instruct")
    shape = shape_of(load(RECIPE, [f"policy.path={path}"]))
    assert shape is not None and part(planned(), "learner", "teacher") == 0
    given = (f"teacher.path={path}", "launch.kind=local")
    assert part(planned(*given), "learner", "teacher") == 4 * shape.parameters
    shared = part(planned(*given, "learner.ranks=2"), "learner", "teacher")
    assert shared == 2 * shape.parameters + 4 * shape.embedding
    assert part(planned(*given, "teacher.coef=0"), "learner", "teacher") == 0
    rounded = planned(*given, "policy.dtype=bfloat16")
    sizes = [one.size for one in rounded.processes[0].parts if one.name == "rounded weights"]
    assert sizes == [2 * SHAPE.decoder, 2 * shape.decoder]


def test_adapters_count_by_the_last_part_of_their_targets() -> None:
    def trained(*targets: str) -> float:
        plan = planned(
            "policy.lora.rank=8",
            "learner.minibatches=1",
            f"policy.lora.targets=[{','.join(targets)}]",
        )
        assert plan.shared < planned().shared / 4, "adapters alone are published"
        return part(plan, "learner", "gradients, moments")

    every = trained()
    assert 0 < trained("mlp.up_proj") == trained("up_proj") < every
    assert trained("up_proj", "mlp.up_proj") == trained("up_proj")
    assert trained("qkv_proj") == trained("q_proj", "qkv_proj") == every, "of another family"


def test_a_separate_critic_has_the_copies_that_the_policy_has() -> None:
    critic = ("advantage={kind: gae}", "critic.kind=separate")
    short = planned(*critic, "policy.dtype=bfloat16", gpu=True)
    assert part(short, "learner", "critic") == (16 + 2) * SHAPE.decoder
    ranks = planned(*critic, "policy.dtype=bfloat16", "learner.ranks=2", "launch.kind=local")
    assert part(ranks, "learner", "critic") == 16 * SHAPE.decoder / 2
    lora = ("policy.lora.rank=8", "learner.minibatches=1")
    alone, both = planned(*critic, *lora), planned(*critic, *lora, "learner.ranks=2")
    trained = part(alone, "learner", "critic")
    assert trained == 16 / 12 * part(alone, "learner", "gradients, moments")
    assert part(both, "learner", "critic") == (4 * SHAPE.decoder + trained) / 2


def test_a_cpu_keeps_float32_and_a_rounded_copy_of_every_decoder() -> None:
    plain, short = planned(), planned("policy.dtype=bfloat16")
    for role in ("learner", "actor"):
        assert part(short, role, "rounded weights") == 2 * SHAPE.decoder
        assert part(plain, role, "rounded weights") == 0
    assert part(short, "learner", "weights") == part(plain, "learner", "weights")
    both = planned("policy.dtype=bfloat16", "advantage={kind: gae}", "critic.kind=separate")
    assert part(both, "learner", "rounded weights") == 4 * SHAPE.decoder
    assert part(planned("policy.dtype=bfloat16", gpu=True), "actor", "rounded weights") == 0


def test_a_serial_run_holds_an_engine_for_each_actor() -> None:
    one, three = (
        part(planned("launch.kind=serial", f"actors.count={count}"), "launcher", "KV cache")
        for count in (1, 3)
    )
    assert three == 3 * one > 0


def test_a_model_that_embeds_is_held_by_all_who_embed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))  # the same weights again
    guided = ("experience={kind: contrast, internalise: none}",)
    contrast = planned(*guided)
    neural = planned(*guided, f"experience.embedder={tmp_path}")
    assert part(contrast, "experience", "embedder") == 0
    assert part(neural, "experience", "embedder") == 1000
    assert neural.private - contrast.private > 1000, "torch as well"
    endpoint = "llm: {url: 'http://localhost:1/v1', model: m}"
    asks = (f"questioning={{kind: llm, {endpoint}}}", "launch.kind=local")
    assert part(planned(*asks), "actor", "embedder") == 0
    assert part(planned(*asks, f"experience.embedder={tmp_path}"), "actor", "embedder") == 1000
    serial = (*guided, "launch.kind=serial")
    alone = planned(*serial, f"experience.embedder={tmp_path}").private - planned(*serial).private
    assert alone == 1000


def test_an_actor_holds_what_its_receivers_hold() -> None:
    copy = 4 * SHAPE.parameters
    mapped = planned()
    assert part(mapped, "actor", "weights") == part(mapped, "actor", "fetched weights") == 0
    assert mapped.shared == 3 * copy, "the two that are kept, and the one that is written"
    cast = planned("weights.kind=collective")
    assert (part(cast, "actor", "fetched weights"), cast.shared) == (2 * copy, 0)
    assert part(cast, "learner", "published weights") == 2 * copy, (
        "one that is sent, one that waits"
    )
    lagging = planned("weights.kind=collective", "actors.weight_lag=2", "buffer.max_staleness=4")
    assert part(lagging, "actor", "fetched weights") == 4 * copy
    workers = ("engine.kind=vllm", "engine.tensor_parallel=2", "weights.kind=collective")
    assert part(planned(*workers), "actor", "fetched weights") == 2 * 2 * copy
    assert part(planned(*workers), "actor", "staged weights") == copy
    lora = planned("policy.lora.rank=8", "learner.minibatches=1")
    assert part(lora, "actor", "weights") == copy, "no file has the base model"


def test_parts_on_gpus_leave_the_host() -> None:
    host_memory, gpu = planned(), planned(gpu=True)
    assert gpu.private < host_memory.private
    learner = gpu.processes[0]
    assert learner.gpu > 16 * SHAPE.parameters
    assert learner.private < host_memory.processes[0].private - 16 * SHAPE.parameters


def test_inputs_of_layers_that_are_offloaded_leave_the_gpu() -> None:
    recomputed = "learner.gradient_checkpointing=true", "learner.token_budget=1024"
    kept, other = (
        planned(*recomputed, f"learner.offload_activations={offloads}", gpu=True)
        for offloads in ("false", "true")
    )
    inputs = 1024 * SHAPE.layers * SHAPE.hidden * 4
    assert kept.processes[0].gpu - other.processes[0].gpu == inputs
    assert other.private - kept.private == inputs
    assert part(planned(*recomputed[1:]), "learner", "offloaded activations") == 0


def test_pinned_memory_of_a_broadcast_is_rounded_as_torch_rounds_it() -> None:
    plan = planned("weights.kind=collective", "policy.dtype=bfloat16", gpu=True)
    copy, pinned = 2 * SHAPE.parameters, 1 << 23
    assert pinned / 2 < copy < pinned
    assert part(plan, "actor", "fetched weights") == 2 * pinned
    assert part(plan, "learner", "published weights") == 2 * pinned


def test_a_gpu_copies_weights_to_and_from_the_files_themselves() -> None:
    plan = planned("weights.kind=shm", gpu=True)
    parts = {(process.role, one.name): one for process in plan.processes for one in process.parts}
    assert ("learner", "published weights") not in parts
    assert parts["actor", "fetched weights"].size == 0
    moments = parts["learner", "checkpoint being written"]
    assert (moments.size, moments.gpu) == (8 * SHAPE.parameters, False)


def test_a_model_that_is_converted_is_whole_in_the_memory_of_each_process_that_loads_it() -> None:
    """Files in the type of the policy are mapped, and their pages can be reclaimed."""
    stored, whole = replace(SHAPE, stored="bfloat16"), 4 * SHAPE.parameters

    def loading(kind: str, *dotlist: str) -> list[float]:
        config = load(RECIPE, [f"launch.kind={kind}", "actors.count=2", *dotlist])
        plan = memory_plan(config, stored, learner_gpu=True, actor_gpu=True)
        parts = [(one.count, part) for one in plan.processes for part in one.parts]
        assert all(not part.gpu for _, part in parts if part.name == LOADING)
        return [count * part.size for count, part in parts if part.name == LOADING]

    assert loading("local", "learner.ranks=4", "weights.kind=shm") == [4 * whole, 2 * whole]
    assert loading("serial", "policy.lora.rank=2") == [whole, whole], "one at a time"
    assert not any(loading("local", "policy.dtype=bfloat16"))


@pytest.mark.parametrize("gpu", [False, True])
def test_chunks_of_logits_have_the_tokens_that_the_key_names_and_else_a_bound(gpu: bool) -> None:
    shape = replace(SHAPE, vocabulary=151936)
    config = load(RECIPE, ["policy.dtype=float32", "learner.token_budget=16384"])

    def needed(chunk: int) -> float:
        config.learner.logprob_chunk = chunk
        return logits_bytes(config, shape, gpu)

    assert needed(4096) == 12 * 4096 * shape.vocabulary
    assert needed(10**6) == 12 * 16384 * shape.vocabulary, "a pass has no more"
    assert 0.99 * 12 * LOGITS[gpu] < needed(0) <= 12 * LOGITS[gpu]


def test_a_short_head_needs_what_sums_its_gradient_if_there_are_several_chunks() -> None:
    keys = ("policy.dtype=bfloat16", "learner.token_budget=4096")
    several = planned(*keys, "learner.logprob_chunk=64", gpu=True)
    one = planned(*keys, "learner.logprob_chunk=4096", gpu=True)
    head = 10 * SHAPE.vocabulary * SHAPE.hidden
    chunks = 12 * SHAPE.vocabulary * (4096 - 64)
    assert part(several, "learner", "logits") - part(one, "learner", "logits") == head - chunks


@given(
    st.sampled_from(
        ("learner.token_budget", "engine.slots", "engine.prefill_tokens", "actors.count")
    ),
    st.integers(1, 64),
)
def test_more_of_a_key_never_needs_less(key: str, number: int) -> None:
    number *= 128 if key == "learner.token_budget" else 1  # one context at least
    less, more = planned(f"{key}={number}"), planned(f"{key}={2 * number}")
    assert more.host > less.host


def test_what_does_not_fit_names_the_key_that_takes_most() -> None:
    parts = (
        MemoryPart("process and libraries", 9.0, ""),
        MemoryPart("KV cache", 5.0, "engine.slots"),
    )
    plan = MemoryPlan((ProcessPlan("actor", 2, parts),), shared=4.0)
    assert plan.host == 32 and problem_of(plan, 32.0, 4.0) == ""
    assert problem_of(plan, 31.0, 4.0).startswith("engine.slots: ")
    assert problem_of(plan, 99.0, 3.0).startswith("weights.dir: ")
    assert problem_of(plan, 99.0, None) == ""
    assert replace(plan, shared=0.0).host == 28


def test_actors_that_are_added_must_fit_beside_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, ["stages=[{steps: 1}]"])
    shape = shape_of(config)
    assert shape is not None
    plan = memory_plan(config, shape, learner_gpu=False, actor_gpu=False)
    (actor,) = [one for one in plan.processes if one.role == "actor"]
    monkeypatch.setattr("evolver_async.memory.host_memory.uses_gpu", lambda _: False)
    monkeypatch.setattr(
        "evolver_async.memory.host_memory.available_bytes", lambda: 2.5 * actor.private
    )
    for more in (-1, 0, 2):
        check_more_actors(config, more)
    with pytest.raises(ConfigError, match=r"^actors: 3 more need "):
        check_more_actors(config, 3)
    check_more_actors(replace(config, launch=replace(config.launch, kind="ray")), 3)


def test_this_host_has_memory() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_what_a_cgroup_leaves_is_counted_with_its_files_and_all_above_it(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    job = root / "slurm" / "job_7"
    job.mkdir(parents=True)
    membership.write_text("0::/slurm/job_7\n")
    groups = _memory_groups(membership, root)
    assert groups == {root, root / "slurm", job}
    assert [_left(group) for group in groups] == [None] * 3
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("900\n")
    (job / "memory.stat").write_text("anon 200\nactive_file 300\ninactive_file 400\n")
    (root / "slurm" / "memory.max").write_text("max\n")
    (root / "slurm" / "memory.current").write_text("900\n")
    assert [_left(one) for one in (root / "slurm", job)] == [None, 800]


def test_the_groups_of_cgroup_1_are_those_of_its_memory_controller(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("5:cpu:/a\n4:memory:/a/b\n")
    memory = root / "memory"
    assert _memory_groups(membership, root) == {memory, memory / "a", memory / "a" / "b"}
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("1000")
    (memory / "memory.usage_in_bytes").write_text("900")
    (memory / "memory.stat").write_text(
        "active_file 1\ntotal_cache 60\ntotal_active_file 50\ntotal_inactive_file 7"
    )
    assert _left(memory) == 157
    assert _memory_groups(tmp_path / "none", root) == set()


def test_a_gpu_counts_whatever_its_number_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "DEVICES", tmp_path)
    for name in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert not host_memory.uses_gpu("auto")
    (tmp_path / "nvidia3").touch()
    assert host_memory.uses_gpu("auto") and not host_memory.uses_gpu("cpu")
