"""`doctor`: probes hurt nobody, verdicts follow from what was found, and the table says it all."""

import io
import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evolver_async.cli import main
from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.study import doctor
from evolver_async.study.doctor import PARTS, machine_table, parameters_of, probe
from evolver_async.study.probes import PROBES, Found
from evolver_async.study.verdict import _training_bytes, verdicts

ROOT = Path(__file__).parent.parent
GIB = 1 << 30
SEVEN_B = 7_600_000_000


def gpu(size_gib: int, capability: tuple[int, int] = (9, 0)) -> dict[str, Any]:
    free = size_gib * GIB
    return {"name": "GPU", "bytes": free, "free_bytes": free, "capability": list(capability)}


def machine(*gpus: dict[str, Any], **changes: Found) -> dict[str, Found]:
    """A machine with everything, of which `changes` are otherwise."""
    found = {name: Found(True, f"{name} is there") for name in PROBES}
    found["shared memory"] = Found(True, "/dev/shm", {"free_bytes": 512 * GIB})
    found["disk"] = Found(True, "runs", {"free_bytes": 2000 * GIB})
    found["vllm"] = Found(True, "vLLM", {"device": "cuda" if gpus else "cpu"})
    found["cuda"] = Found(bool(gpus), f"{len(gpus)} GPUs", {"devices": list(gpus)})
    return found | changes


def node(**changes: Any) -> Config:
    """Four engines and four learner ranks on eight GPUs, with a model of 7 B in bfloat16."""
    config = Config()
    config.policy.dtype = "bfloat16"
    config.engine = replace(config.engine, kind="vllm", device="cuda", memory=0.9)
    config.actors.count = 4
    config.learner = replace(config.learner, ranks=4, device="cuda", packing=True)
    config.launch.gpus.actors, config.launch.gpus.learner = [0, 1, 2, 3], [4, 5, 6, 7]
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def wrong(config: Config, found: dict[str, Found], parameters: int = SEVEN_B) -> list[str]:
    """The keys that cannot have what they want, without their values."""
    said = verdicts(config, found, parameters)
    return [one.key.partition("=")[0] for one in said if not one.works]


EIGHT = [gpu(80)] * 8
LACKS = [
    (node(), machine(*EIGHT), []),
    (node(), machine(*EIGHT[:7]), ["launch.gpus.learner"]),
    (node(), machine(*EIGHT, vllm=Found(False, "not installed")), ["engine.kind"]),
    (node(), machine(*EIGHT, vllm=Found(True, "vLLM", {"device": "cpu"})), ["engine.kind"]),
    (node(), machine(*EIGHT, nccl=Found(False, "no NCCL")), ["learner.ranks"]),
    (node(), machine(*EIGHT, varlen=Found(False, "old")), ["learner.packing"]),
    (node(), machine(*[gpu(80, (7, 0))] * 8), ["policy.dtype"]),
    (node(), machine(*[gpu(24)] * 8), ["learner.ranks"]),
    (node(), machine(*[gpu(12)] * 8), ["engine.memory", "learner.ranks"]),
    (node(weights__kind="cuda_ipc"), machine(*EIGHT), ["weights.kind"]),
    (node(metrics__wandb="online"), machine(*EIGHT, wandb=Found(False, "")), ["metrics.wandb"]),
    (node(security__keys="k"), machine(*EIGHT, encryption=Found(False, "")), ["security.keys"]),
    (
        node(),
        machine(*EIGHT, **{"shared memory": Found(True, "", {"free_bytes": 100 * GIB})}),
        ["weights.dir"],
    ),
    (node(), machine(*EIGHT, disk=Found(True, "", {"free_bytes": 200 * GIB})), ["run.dir"]),
]


@pytest.mark.parametrize(("config", "found", "expected"), LACKS)
def test_the_key_that_lacks_something_is_named(config, found, expected):
    assert list(dict.fromkeys(wrong(config, found))) == expected


def test_without_a_gpu_everything_that_asks_for_one_is_named():
    found = machine(nccl=Found(False, ""), varlen=Found(False, ""))
    assert wrong(node(), found) == [
        "engine.device",
        "learner.device",
        "launch.gpus.actors",
        "launch.gpus.learner",
        "engine.kind",
        "learner.ranks",
        "learner.packing",
    ]
    assert wrong(Config(), found, 0) == []


def test_engine_and_learner_on_one_gpu_need_room_for_both():
    """1.5 B parameters: 3 GB to generate, 18 bytes each to train."""
    shared = node(actors__count=1, learner__ranks=1, weights__kind="cuda_ipc", engine__memory=0.3)
    shared.launch.gpus.actors = shared.launch.gpus.learner = [0]
    parameters = 1_500_000_000
    assert wrong(shared, machine(gpu(80)), parameters) == []
    assert wrong(shared, machine(gpu(32)), parameters) == ["engine.memory"]
    shared.engine.memory = 0.9
    assert wrong(shared, machine(gpu(80)), parameters) == ["engine.memory"]
    shared.policy.lora.rank = 16  # only adapters have gradients and moments
    assert wrong(shared, machine(gpu(80)), parameters) == []


def test_only_a_single_rank_shares_what_adapters_leave_frozen():
    """In bfloat16: the policy's copy, the reference's and the critic's."""
    config = node(learner__ranks=1, loss__kl_coef=0.1, advantage__kind="gae")
    config.policy.lora.rank, config.critic.kind = 16, "separate"
    assert _training_bytes(config, SEVEN_B) == 2 * SEVEN_B
    config.learner.ranks = 2
    assert _training_bytes(config, SEVEN_B) == 3 * 2 * SEVEN_B
    config.loss.kl_coef = 0.0
    assert _training_bytes(config, SEVEN_B) == 2 * 2 * SEVEN_B


def test_cuda_ipc_is_refused_to_an_engine_on_another_gpu():
    config = node(actors__count=2, learner__ranks=1, weights__kind="cuda_ipc", engine__memory=0.3)
    config.launch.gpus.actors, config.launch.gpus.learner = [0, 1], [0]
    assert wrong(config, machine(*EIGHT), 1_500_000_000) == ["weights.kind"]


def test_shared_memory_holds_the_copies_of_every_reader():
    """14.2 GiB each: three of the channel, and two more of each of the four vLLM actors."""
    room = machine(*EIGHT)
    for kind, copies in (("torch", 3), ("vllm", 11)):
        room["shared memory"] = Found(True, "", {"free_bytes": copies * 2 * SEVEN_B})
        assert "weights.dir" not in wrong(node(engine__kind=kind), room)
        room["shared memory"] = Found(True, "", {"free_bytes": copies * 2 * SEVEN_B - 1})
        assert "weights.dir" in wrong(node(engine__kind=kind), room)


def test_actors_that_see_the_same_gpu_take_their_memory_from_it_together():
    config = node(actors__count=2, learner__ranks=1, learner__device="cpu", learner__packing=False)
    config.launch.gpus.actors = config.launch.gpus.learner = []
    assert wrong(config, machine(gpu(80), gpu(80))) == ["engine.memory"]
    config.launch.gpus.actors = [0, 1]
    assert wrong(config, machine(gpu(80), gpu(80))) == []


def test_every_part_has_a_probe_and_a_remedy():
    assert {part.probe for part in PARTS} == PROBES.keys() - {"recipe"}
    assert all(part.remedy and (part.always or part.purpose) for part in PARTS)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed: SIGSEGV"),
        ("import time; time.sleep(60)", "no answer within 3 s"),
        ("import sys; sys.exit(0)", "ended without an answer"),
        ("import sys; print('out'); sys.exit('broken at once')", "exit code 1: broken at once"),
    ],
)
def test_a_probe_that_dies_or_hangs_is_a_finding(tmp_path, monkeypatch, body, said):
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{body}"\n')
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    found = probe("sockets", deadline_s=3.0)
    assert not found.works and said in found.said


def test_an_error_within_a_probe_is_a_finding(tmp_path):
    found = probe("shared memory", str(tmp_path / "nowhere"))
    assert not found.works and "No such file or directory" in found.said
    assert probe("no such probe").said.startswith("KeyError")


def test_probes_of_this_machine_use_what_they_are_about(tmp_path):
    asked: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("python", "torch", "gloo", "sockets", "encryption", "sandbox"), ()
    )
    asked |= {"shared memory": (str(tmp_path),), "disk": (str(tmp_path / "runs"),)}
    found = doctor.examine(asked)
    assert {name: one.said for name, one in found.items() if not one.works} == {}
    assert found["disk"].facts["free_bytes"] > 0


def test_parameters_are_counted_from_the_headers(tmp_path):
    for number, shapes in enumerate(([[3, 4], [5]], [[2, 2, 2]])):
        tensors = {
            str(index): {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
            for index, shape in enumerate(shapes)
        }
        header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
        path = tmp_path / f"model-{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert parameters_of(tmp_path) == 3 * 4 + 5 + 8
    assert parameters_of(tmp_path / "nowhere") == 0


def test_the_table_says_how_to_get_what_is_missing_and_nothing_else():
    found = machine(ray=Found(False, "not installed"))
    found["cuda"] = Found(True, "0: GPU [80 GiB]", {"devices": EIGHT})
    console = Console(file=io.StringIO(), width=200)
    console.print(machine_table(found))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "pip install -e '.[ray]'" in text, "square brackets are text here"
    assert "0: GPU [80 GiB]" in text
    assert ".[gpu]" not in text
    assert len(re.findall(r"\byes\b", text)) == len(PARTS) - 1


def test_doctor_fails_only_where_the_default_cannot_run(monkeypatch, capsys):
    found = machine(**{name: Found(False, "gone") for name in ("cuda", "vllm", "ray", "wandb")})
    monkeypatch.setattr(doctor, "examine", lambda asked: found)
    assert main(["doctor"]) == 0
    assert "The default recipe can run here" in capsys.readouterr().out
    found["shared memory"] = Found(False, "/dev/shm: No space left on device")
    assert main(["doctor"]) == 1
    assert "cannot run here: shared memory." in capsys.readouterr().out


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"stages: [{{steps: 1}}]\nrun: {{dir: {tmp_path}/runs}}\n")
    return path


def test_a_recipe_that_can_run_here_starts_nothing(recipe, capsys):
    assert main(["doctor", str(recipe), "policy.hidden_size=32"]) == 0
    assert f"{recipe} can run here." in capsys.readouterr().out
    assert not (recipe.parent / "runs").exists()


def test_a_recipe_that_cannot_run_here_is_told_every_key(recipe, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = ["policy.path=/nowhere", "env.name=frozen_lak", "learner.device=cuda"]
    assert main(["doctor", str(recipe), *wanted]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.endswith("cannot run here: learner.device=cuda, policy.path, env.name.")


def test_a_recipe_that_is_none_is_one_sentence(capsys):
    assert main(["doctor", "learner.lr=1"]) == 2
    assert main(["doctor", "no.yaml"]) == 2
    assert "no.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu_single", "gpu_node", "gpu_cluster"])
def test_the_gpu_recipes_fit_the_machine_they_are_written_for(name):
    config = load(ROOT / "configs" / f"{name}.yaml")
    count = 1 if name == "gpu_single" else 8
    parameters = 1_540_000_000 if name == "gpu_single" else SEVEN_B
    assert wrong(config, machine(*[gpu(80)] * count), parameters) == []
    assert "engine.device" in wrong(config, machine(), parameters)
