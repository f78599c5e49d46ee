"""`doctor`: probes in processes of their own, requirements of recipes, and the tables."""

import io
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import GIB
from machines import machine as bare
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from evolver_async.cli import main
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import load
from evolver_async.doctor import capabilities
from evolver_async.doctor.capabilities import CAPABILITIES, machine_table, probe
from evolver_async.doctor.probes.probe_main import PROBES
from evolver_async.doctor.probes.recipe import model
from evolver_async.doctor.probes.result import ProbeResult
from evolver_async.doctor.recipe_check import requirements
from evolver_async.memory.bounds import Shape, activation_bytes, cache_bytes, training_bytes
from evolver_async.model.layers import checkpoint_layers
from evolver_async.model.policy import hidden_states

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "data" / "models" / "Qwen2.5-1.5B-Instruct"
SEVEN_B = 7_600_000_000
SEVEN = Shape(
    SEVEN_B, layers=28, kv_heads=4, head_size=128, hidden=3584, inner=18944, positions=32768
)
SMALL = Shape(1_500_000_000, 28, 2, 128, 1536, 8960, 32768)


def gpu(size_gib: int, capability: tuple[int, int] = (9, 0)) -> dict[str, Any]:
    free = size_gib * GIB
    return {"name": "GPU", "bytes": free, "free_bytes": free, "capability": list(capability)}


def machine(*gpus: dict[str, Any], **changes: ProbeResult) -> dict[str, ProbeResult]:
    return bare(*gpus, host_bytes=1000 * GIB) | changes


def node(**changes: Any) -> Config:
    """Four engines and four learner ranks on eight GPUs, with a model of 7 B in bfloat16."""
    config = Config()
    config.policy.dtype = "bfloat16"
    config.engine = replace(config.engine, kind="vllm", device="cuda", memory=0.9)
    config.actors.count = 4
    config.learner = replace(
        config.learner, ranks=4, device="cuda", packing=True, gradient_checkpointing=True
    )
    config.launch.gpus.actors, config.launch.gpus.learner = [0, 1, 2, 3], [4, 5, 6, 7]
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def wrong(config: Config, found: dict[str, ProbeResult], shape: Shape = SEVEN) -> list[str]:
    """The keys that cannot have what they want, without their values."""
    said = requirements(config, found | {"model": ProbeResult(True, "a model", asdict(shape))})
    return [one.key.partition("=")[0] for one in said if one.met is False]


EIGHT = [gpu(80)] * 8
LACKS = [
    (node(), machine(*EIGHT), []),
    (node(), machine(*EIGHT[:7]), ["launch.gpus.learner"]),
    (node(), machine(*EIGHT, vllm=ProbeResult(False, "not installed")), ["engine.kind"]),
    (node(), machine(*EIGHT, vllm=ProbeResult(True, "vLLM", {"device": "cpu"})), ["engine.kind"]),
    (node(), machine(*EIGHT, nccl=ProbeResult(False, "no NCCL")), ["learner.ranks"]),
    (node(), machine(*EIGHT, varlen=ProbeResult(False, "old")), ["learner.packing"]),
    (node(), machine(*[gpu(80, (7, 0))] * 8), ["policy.dtype"]),
    (node(), machine(*[gpu(24)] * 8), ["learner.ranks"]),
    (node(), machine(*[gpu(12)] * 8), ["engine.memory", "learner.ranks"]),
    (
        node(security__keys="k"),
        machine(*EIGHT, encryption=ProbeResult(False, "")),
        ["security.keys"],
    ),
    (
        node(),
        machine(*EIGHT, **{"shared memory": ProbeResult(True, "", {"free_bytes": 50 * GIB})}),
        ["weights.dir"],
    ),
    (node(), machine(*EIGHT, disk=ProbeResult(True, "", {"free_bytes": 200 * GIB})), ["run.dir"]),
]


@pytest.mark.parametrize(("best", "lacking"), [(0, []), (1, ["run.dir"])])
def test_the_best_checkpoints_need_disk_beside_the_newest(best: int, lacking: list[str]) -> None:
    """Of 78 GiB each: two are kept and one is being written."""
    disk = ProbeResult(True, "", {"free_bytes": 300 * GIB})
    assert wrong(node(checkpoint__keep_best=best), machine(*EIGHT, disk=disk)) == lacking


@pytest.mark.parametrize(("config", "found", "expected"), LACKS)
def test_the_key_that_lacks_something_is_named(config, found, expected):
    assert list(dict.fromkeys(wrong(config, found))) == expected


def test_without_a_gpu_everything_that_asks_for_one_is_named():
    found = machine(nccl=ProbeResult(False, ""), varlen=ProbeResult(False, ""))
    assert wrong(node(), found) == [
        "engine.device",
        "learner.device",
        "learner.ranks",
        "learner.packing",
        "launch.gpus.actors",
        "launch.gpus.learner",
        "engine.kind",
    ]
    assert wrong(Config(), found, replace(SEVEN, parameters=200_000, layers=2, hidden=64)) == []


def test_engine_and_learner_on_one_gpu_need_room_for_both():
    """1.5 B parameters: 3 GB to generate, 18 bytes each to train."""
    shared = node(actors__count=1, learner__ranks=1, weights__kind="cuda_ipc", engine__memory=0.3)
    shared.launch.gpus.actors = shared.launch.gpus.learner = [0]
    assert wrong(shared, machine(gpu(80)), SMALL) == []
    assert wrong(shared, machine(gpu(32)), SMALL) == ["engine.memory"]
    shared.engine.memory = 0.9
    assert wrong(shared, machine(gpu(80)), SMALL) == ["engine.memory"]
    shared.policy.lora.rank = 16  # only adapters have gradients and moments
    assert wrong(shared, machine(gpu(80)), SMALL) == []


def test_only_a_single_rank_shares_what_adapters_leave_frozen():
    """In bfloat16: the policy's copy, the reference's and the critic's."""
    config = node(learner__ranks=1, loss__kl_coef=0.1, advantage__kind="gae")
    config.policy.lora.rank, config.critic.kind = 16, "separate"
    assert training_bytes(config, SEVEN) == 2 * SEVEN_B
    config.learner.ranks = 2
    assert training_bytes(config, SEVEN) == 3 * 2 * SEVEN_B
    config.loss.kl_coef = 0.0
    assert training_bytes(config, SEVEN) == 2 * 2 * SEVEN_B


def test_training_needs_what_its_largest_stage_holds():
    config = node(learner__ranks=1)
    plain = training_bytes(config, SEVEN)
    assert plain == 18 * SEVEN_B
    critic = {"advantage": {"kind": "gae"}}
    config.critic.kind = "separate"
    config.stages = [StageConfig(steps=1), StageConfig(steps=1, override=critic)]
    assert training_bytes(config, SEVEN) == 2 * plain
    config.stages.append(StageConfig(steps=1, override={"loss": {"kl_coef": 0.1}}))
    assert training_bytes(config, SEVEN) == 2 * plain + 2 * SEVEN_B, "the critic stays"
    config.stages = [StageConfig(kind="dpo", steps=1), StageConfig(kind="sft", override=critic)]
    assert training_bytes(config, SEVEN) == plain + 2 * SEVEN_B, "a dpo stage has a reference"
    config.stages = [StageConfig(kind="reward_model", steps=1), StageConfig(kind="kto", steps=1)]
    assert training_bytes(config, SEVEN) == 2 * plain, "which is dropped after its last stage"
    config.stages = [
        StageConfig(steps=1),
        StageConfig(override={"learner": {"token_budget": 32768}}),
    ]
    shorter = activation_bytes(node(), SEVEN)
    assert activation_bytes(config, SEVEN) == 2 * shorter


def test_shared_memory_holds_the_copies_of_every_reader():
    """14.2 GiB each: two versions, one that is written, and one that actors still map."""
    room, copies = machine(*EIGHT), 4
    for kind in ("torch", "vllm"):
        room["shared memory"] = ProbeResult(True, "", {"free_bytes": copies * 2 * SEVEN_B})
        assert "weights.dir" not in wrong(node(engine__kind=kind), room)
        room["shared memory"] = ProbeResult(True, "", {"free_bytes": copies * 2 * SEVEN_B - 1})
        assert "weights.dir" in wrong(node(engine__kind=kind), room)


def test_actors_that_see_the_same_gpu_take_their_memory_from_it_together():
    config = node(actors__count=2, learner__ranks=1, learner__device="cpu", learner__packing=False)
    config.launch.gpus.actors = config.launch.gpus.learner = []
    assert wrong(config, machine(gpu(80), gpu(80))) == ["engine.memory"]
    config.launch.gpus.actors = [0, 1]
    assert wrong(config, machine(gpu(80), gpu(80))) == []


def test_every_capability_has_a_probe_and_a_remedy():
    assert {row.probe for row in CAPABILITIES} == PROBES.keys() - {"recipe", "model", "pace"}
    assert all(row.remedy and (row.always or row.purpose) for row in CAPABILITIES)


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed: SIGSEGV"),
        ("import time; time.sleep(60)", "no result within 3 s"),
        ("import sys; sys.exit(0)", "ended without a result"),
        ("import sys; print('out'); sys.exit('broken at once')", "exit code 1: broken at once"),
    ],
)
def test_a_probe_that_dies_or_hangs_is_a_finding(tmp_path, monkeypatch, body, said):
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{body}"\n')
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    found = probe("sockets", deadline_s=3.0 if "3 s" in said else 120.0)
    assert not found.works and said in found.summary


@pytest.mark.process
def test_an_error_within_a_probe_is_a_finding(tmp_path):
    found = probe("shared memory", str(tmp_path / "nowhere"))
    assert not found.works and "No such file or directory" in found.summary
    assert probe("no such probe").summary.startswith("KeyError")


@pytest.mark.process
def test_probes_of_this_machine_use_what_they_are_about(tmp_path):
    asked: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("python", "torch", "gloo", "sockets", "encryption", "sandbox"), ()
    )
    asked |= {"shared memory": (str(tmp_path),), "disk": (str(tmp_path / "runs"),)}
    found = capabilities.run_probes(asked)
    assert {name: one.summary for name, one in found.items() if not one.works} == {}
    assert found["disk"].facts["free_bytes"] > 0


def test_the_torch_engine_needs_room_for_every_slot_at_its_longest():
    """14.2 GiB of weights, and 28 layers x 4 heads x 128 x 2 x 2 bytes a token."""
    config = node(engine__kind="torch", engine__slots=100, policy__max_length=9999)
    cache = 100 * 10_000 * 57_344
    assert cache_bytes(config, SEVEN) == cache
    exactly = {**gpu(80), "bytes": 2 * SEVEN_B + cache}
    assert wrong(config, machine(*[exactly] * 8)) == []
    exactly["bytes"] -= 1
    assert wrong(config, machine(*[exactly] * 8)) == ["engine.slots"] * 4


def test_without_a_gpu_the_models_need_memory_of_the_host():
    config = Config()
    config.engine.device = config.learner.device = "cpu"
    assert "engine.slots" in wrong(config, bare(host_bytes=64 * GIB))
    assert wrong(config, bare(host_bytes=1000 * GIB)) == []


def test_vllm_needs_room_for_one_whole_context():
    config = node(policy__max_length=32768, engine__memory=0.19)
    assert wrong(config, machine(*EIGHT)) == ["engine.memory"] * 4
    config.policy.max_length = 1024
    assert wrong(config, machine(*EIGHT)) == []


def test_more_positions_than_the_model_has_are_refused():
    config = node(policy__max_length=40000, learner__token_budget=40000)
    assert wrong(config, machine(*EIGHT)) == ["policy.max_length"]


@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_are_at_least_what_is_reckoned(recomputed):
    """Against every tensor that the layers of a model on the CPU keep, each storage once."""
    shape = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=32,
    )
    model = AutoModelForCausalLM.from_config(shape)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    if recomputed:
        checkpoint_layers(model)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens_BT = torch.zeros(1, 512, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = hidden_states(model, tokens_BT)
    assert held.requires_grad
    config = Config()
    config.learner = replace(config.learner, token_budget=512, gradient_checkpointing=recomputed)
    reckoned = activation_bytes(config, Shape(0, 6, 4, 16, 64, 256, 0))
    assert 0.2 * sum(kept.values()) < reckoned <= sum(kept.values())


def test_a_model_is_measured_by_its_configuration_alone(tmp_path):
    found = model(str(ROOT / "configs" / "gpu_single.yaml"), f"policy.path={MODEL}")
    assert found.facts == {
        "parameters": 1_543_714_304,
        "layers": 28,
        "kv_heads": 2,
        "head_size": 128,
        "hidden": 1536,
        "inner": 8960,
        "positions": 32768,
    }
    preset = model(str(ROOT / "configs" / "frozen_lake.yaml"))
    assert 100_000 < preset.facts["parameters"] < 1_000_000


def test_a_model_that_is_not_there_has_no_size(monkeypatch, capsys):
    recipe = ROOT / "configs" / "gpu_node.yaml"
    missing = model(str(recipe), "policy.path=/nowhere")
    assert not missing.works and missing.summary == "policy.path: /nowhere is not a directory"
    said = requirements(load(recipe), machine(*EIGHT) | {"model": missing})
    unknown = {one.key: one.why for one in said if one.met is None}
    assert unknown.keys() >= {"engine.memory", "learner.ranks", "weights.dir", "run.dir"}
    assert set(unknown.values()) == {"unknown: policy.path: /nowhere is not a directory"}
    assert all(one.met for one in said if one.key not in unknown)


def test_the_table_says_how_to_get_what_is_missing_and_nothing_else():
    found = machine(ray=ProbeResult(False, "not installed"))
    found["cuda"] = ProbeResult(True, "0: GPU [80 GiB]", {"devices": EIGHT})
    console = Console(file=io.StringIO(), width=200)
    console.print(machine_table(found))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "pip install -e '.[ray]'" in text, "square brackets are text here"
    assert "0: GPU [80 GiB]" in text
    assert ".[gpu]" not in text
    assert len(re.findall(r"\byes\b", text)) == len(CAPABILITIES) - 1


def test_doctor_fails_only_where_the_default_cannot_run(monkeypatch, capsys):
    found = machine(
        **{name: ProbeResult(False, "gone") for name in ("cuda", "vllm", "ray", "wandb")}
    )
    monkeypatch.setattr(capabilities, "run_probes", lambda asked: found)
    assert main(["doctor"]) == 0
    assert "The default recipe can run here" in capsys.readouterr().out
    found["shared memory"] = ProbeResult(False, "/dev/shm: No space left on device")
    assert main(["doctor"]) == 1
    assert "cannot run here; change or provide: shared memory." in capsys.readouterr().out


def test_doctor_counts_the_hours_of_a_gpu_recipe(monkeypatch, capsys):
    found = machine(*EIGHT, model=ProbeResult(False, "not examined"))
    monkeypatch.setattr(capabilities, "run_probes", lambda asked: found)
    recipe, given = str(ROOT / "configs" / "gpu_single.yaml"), f"policy.path={MODEL}"
    main(["doctor", recipe, given])
    assert "By count, on 1 x H100: " in capsys.readouterr().out
    main(["doctor", recipe, given, "learner.device=cpu"])
    assert "By count" not in capsys.readouterr().out


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"stages: [{{steps: 1}}]\nrun: {{dir: {tmp_path}/runs}}\n")
    return path


@pytest.mark.process
def test_a_recipe_that_can_run_here_starts_nothing(recipe, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/dev/shm")
    assert main(["doctor", str(recipe), "policy.hidden_size=32", "weights.dir=~/."]) == 0
    assert f"{recipe} can run here." in capsys.readouterr().out
    assert not (recipe.parent / "runs").exists()


@pytest.mark.process
def test_a_recipe_that_cannot_run_here_is_told_every_key(recipe, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = ["policy.path=/nowhere", "env.name=frozen_lak", "learner.device=cuda"]
    assert main(["doctor", str(recipe), *wanted]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.endswith(
        "change or provide: learner.device=cuda, learner.packing, policy.path, env.name."
    )


def test_a_recipe_that_is_none_is_one_sentence(capsys):
    assert main(["doctor", "learner.lr=1"]) == 2
    assert main(["doctor", "no.yaml"]) == 2
    assert "no.yaml" in capsys.readouterr().err
