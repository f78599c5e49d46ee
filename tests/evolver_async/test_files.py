"""Files that others wrote: nested too deep, with a head that is too long; what a guard protects."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evolver_async.checkpoint import shards
from evolver_async.checkpoint.checkpoints import CheckpointError
from evolver_async.config.load import load
from evolver_async.config.values.config_error import ConfigError
from evolver_async.files import make_own, parsed
from evolver_async.metrics.tail import row_of
from evolver_async.model.lora import fingerprint_of
from evolver_async.model.policy import load_model
from evolver_async.model.tokenizer import ModelError, end_tokens, load_tokenizer
from evolver_async.study.definition import read

ROOT = Path(__file__).parents[2]
DEEP = "[" * 3000 + "]" * 3000


def test_yaml_that_is_nested_too_deep_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(f"recipe: bandit\nenv: {DEEP}\n")
    for reader in (load, read):
        with pytest.raises(ConfigError, match=r"deep\.yaml: .* nested too deep"):
            reader(path)
    with pytest.raises(ConfigError, match=r"env\.params: cannot read"):
        load(None, [f"env.params={DEEP}"])


def test_json_that_is_nested_too_deep_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parsed(DEEP)
    assert row_of(f'{{"a": {DEEP}}}'.encode()) is None
    (tmp_path / "generation_config.json").write_text(DEEP)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        end_tokens(tmp_path)


def test_no_file_of_json_is_read_without_that_check() -> None:
    """`files.parsed` reads JSON, but where the same lines treat deep nesting themselves, and where
    another process of ours wrote the text a moment ago."""
    careful = {"evolver_async/files.py", "evolver_async/buffer/tasks/row_files.py"}
    careful |= {f"actors/endpoint/{one}.py" for one in ("request", "template", "messages_form")}
    careful |= {f"actors/adapters/{one}.py" for one in ("openenv_env", "service_client")}
    careful |= {f"actors/adapters/{one}.py" for one in ("reasoning_gym_env", "verifiers_env")}
    careful |= {"actors/experience/pool_file.py", "evolver_async/doctor/capabilities.py"}
    careful |= {f"actors/sandbox/{one}.py" for one in ("guest", "namespaces", "process")}
    careful |= {f"evolver_async/weights/collective/{one}.py" for one in ("event_log", "sender")}
    careful |= {"evolver_async/runs/report/browser.py"}
    found = set()
    for path in (one for wing in ("evolver_async", "actors", "learner") for one in _python(wing)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load"):
                found.add(str(path.relative_to(ROOT)))
    assert found <= careful


def _python(wing: str) -> list[Path]:
    return sorted((ROOT / wing).rglob("*.py"))


def test_a_file_of_tensors_with_too_long_a_head_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    torn = tmp_path / "zz.safetensors"
    torn.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"zz\.safetensors"):
        shards.read(tmp_path, "zz")
    with pytest.raises(ModelError, match=r"zz\.safetensors"):
        fingerprint_of(str(tmp_path), ["a"], "float32")


def test_a_model_whose_files_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    config |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "architectures": ["LlamaForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(tmp_path, dtype="float32", device="cpu")
    (tmp_path / "config.json").write_text(f'{{"a": {DEEP}}}')
    with pytest.raises(ModelError, match=tmp_path.name):
        load_model(tmp_path, dtype="float32", device="cpu")
    (tmp_path / "tokenizer.json").write_text(DEEP)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_link_in_the_place_of_an_own_directory_is_unlinked(tmp_path: Path) -> None:
    others, own = tmp_path / "others", tmp_path / "own"
    (others / "deep").mkdir(parents=True)
    own.symlink_to(others)
    make_own(own)
    make_own(own)
    assert own.is_dir() and not own.is_symlink() and (others / "deep").exists()


GUARDED = """
from evolver_async.buffer.state.ledger import Amount, Ledger
from evolver_async.errors import Inconsistency
assert False, "are removed here"
ledger = Ledger()
ledger.receive("demo", Amount(groups=1))
try:
    ledger.check({})
except Inconsistency:
    raise SystemExit(9)
"""


@pytest.mark.process
def test_what_guards_data_does_so_without_asserts() -> None:
    command = [sys.executable, "-O", "-c", GUARDED]
    done = subprocess.run(
        command, cwd=ROOT, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 9
