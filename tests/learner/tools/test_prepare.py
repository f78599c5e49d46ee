"""Preparation of a policy: what is laid to the model's directory, and what is not."""

import errno
import re
from pathlib import Path

import pytest
import torch
from small_models import SHAPE, TOKENIZER
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engines.decoding import kv_slots
from actors.envs.bandit import Bandit
from actors.envs.vocabulary import vocabulary_of
from evolver_async.config import ConfigError
from evolver_async.config.load import dump, load
from evolver_async.model import policy
from evolver_async.process.setup import RoleArgs
from learner.tools import prepare


def arguments(run_dir: Path, *changes: str) -> RoleArgs:
    dump(load(None, ["stages.0.steps=1", *changes]), run_dir / "config.yaml")
    return RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir)


def test_a_disk_that_is_full_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(policy, "make_tiny", full)
    with pytest.raises(OSError, match="No space left"):
        prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("policy.lora.targets: no linear is named x", "policy.lora.targets: no linear is named x"),
        ("learner.prefix_trees: must not be always", "learner.prefix_trees: must not be always"),
        ("policy.v1 has no weights", "policy.path: policy.v1 has no weights"),
    ],
)
def test_a_model_error_names_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    def refuse(_: object) -> None:
        raise policy.ModelError(said)

    monkeypatch.setattr(policy, "load_tokenizer", refuse)
    with pytest.raises(ConfigError) as refused:
        prepare.main(arguments(tmp_path, "policy.path=anywhere", "policy.dtype=float32"))
    assert str(refused.value) == expected


def test_a_context_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}"))
    longer = arguments(tmp_path, f"policy.path={tmp_path / 'policy'}", "policy.max_length=1025")
    said = r"^policy\.max_length: is 1025, but the model has 1024 positions"
    with pytest.raises(ConfigError, match=said):
        prepare.main(longer)


def test_a_teacher_is_compared_with_the_policy_before_a_start(tmp_path: Path) -> None:
    tiny = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32, "max_length": 1024}
    own = vocabulary_of(load(None, ["stages.0.steps=1"]))
    for name, words in (("other", [*own, "phoen"]), ("short", own)):
        given = tiny if name == "other" else tiny | {"max_length": 1023}
        policy.make_tiny(tmp_path / name, seed=0, words=words, **given)

    def refused(*changes: str) -> str:
        with pytest.raises(ConfigError) as caught:
            prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}", *changes))
        return str(caught.value)

    assert refused(f"teacher.path={tmp_path / 'nowhere'}").startswith("teacher.path: ")
    other = f"teacher.path={tmp_path / 'other'}"
    assert refused(other, "teacher.divergence=jsd").startswith(
        "teacher.divergence: must be reverse"
    )
    assert refused(f"teacher.path={tmp_path / 'short'}").startswith("teacher.path: ")
    unheard = ("teacher={url: 'http://127.0.0.1:9/v1', model: m, retries: 0}", "launch.kind=local")
    assert refused(*unheard).startswith("teacher.url: ")
    prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}", other))


def test_an_error_of_a_library_is_laid_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("expected value\nat line 1")

    monkeypatch.setattr(policy, "load_tokenizer", refuse)
    with pytest.raises(ConfigError, match=r"^policy\.path: RuntimeError: expected value at line 1"):
        prepare.main(arguments(tmp_path, "policy.path=anywhere", "policy.dtype=float32"))


LATENT = {
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32},
}
# recurrent layers, and no cap of its logits that is ever felt
STATES = {"max_position_embeddings": 256, "logits_soft_cap": 1e9}
CHUNKS = {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 64}


def made(folder: Path, kind: str, sizes: dict[str, float]) -> list[str]:
    """Write a model of this kind, the same one on every machine; return the keys that name it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | sizes))
    model.save_pretrained(folder / "policy")
    TOKENIZER.save_pretrained(folder / "policy")
    return [f"policy.path={folder / 'policy'}", "policy.max_length=128"]


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("deepseek_v3", LATENT, "engine.kind: torch cannot run DeepseekV3ForCausalLM of policy"),
        ("falcon", {"alibi": True}, "engine.kind: torch cannot run FalconForCausalLM of policy"),
        ("mistral", {"sliding_window": 16}, r"engine.kind: .*: the model's sliding window 16 is"),
        ("recurrent_gemma", STATES, "engine.kind: .*: it has layers of type recurrent"),
        ("llama4_text", CHUNKS, "policy.path: Llama4ForCausalLM does not name the part"),
    ],
)
def test_a_model_that_the_engine_cannot_run_is_refused(
    tmp_path: Path, kind: str, sizes: dict[str, float], said: str
) -> None:
    """It failed in the actors, at their start or in their first turn."""
    given = arguments(tmp_path, *made(tmp_path, kind, sizes))
    with pytest.raises(ConfigError, match=f"^{said}"):
        prepare.main(given)


def test_log_probs_other_than_those_that_are_trained_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that carries what its configuration does not name, such as a state."""
    monkeypatch.setattr(kv_slots, "other_layers", lambda _: set())
    keys = made(tmp_path, "recurrent_gemma", STATES)
    with pytest.raises(ConfigError, match=r"^engine\.kind: .*its log-probs differ by .* trained"):
        prepare.main(arguments(tmp_path, *keys))


def test_attention_that_takes_no_packed_rows_is_named_by_its_key(tmp_path: Path) -> None:
    keys = made(tmp_path, "falcon", {})
    with pytest.raises(ConfigError, match=r"^learner\.packing: must be false, as FalconFor"):
        prepare.main(arguments(tmp_path, *keys))
    prepare.main(arguments(tmp_path, *keys, "learner.packing=false", "rollout.max_tokens=8"))


SHOP = "{kind: rl, steps: 1, override: {env: {name: webshop, params: {}}}}"
LINES = """{"split": "train", "seed": 1}
{"split": "test", "seed": 1, "env": "webshop", "params": {}}
"""


@pytest.mark.parametrize(
    "named",
    [
        (f"stages=[{{kind: rl, steps: 1}}, {SHOP}]",),
        ("tasks.mixture=[{env: bandit, params: {}}, {env: webshop, params: {}}]",),
        ("eval.sets={shop: {env: {name: webshop}, split: test, tasks: 1}}",),
        ("tasks.path=LINES",),
    ],
)
def test_the_preset_knows_the_words_of_the_environments(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    path, lines = tmp_path / "policy", tmp_path / "lines.jsonl"
    lines.write_text(LINES)
    changes = [change.replace("LINES", str(lines)) for change in named]
    prepare.main(arguments(tmp_path, f"policy.path={path}", "policy.max_length=2048", *changes))
    tokenizer = policy.load_tokenizer(str(path))
    text = "search[lightweight headphones] Umber hoodie, breathable mesh"
    assert [tokenizer.decode([token]).strip() for token in tokenizer.encode(text)] == [
        *("search", "[", "lightweight", "headphones", "]"),
        *("Umber", "hoodie", ",", "breathable", "mesh"),
    ]


class Speechless(Bandit):
    def vocabulary(self) -> list[str]:
        raise RuntimeError("no dictionary")


class Spacious(Bandit):
    def vocabulary(self) -> list[str]:
        return ["arm", "two words"]


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (Speechless, "RuntimeError: no dict"),
        (Spacious, "ValueError: 'two words' is not of ASCII"),
    ],
)
def test_an_environment_that_cannot_name_its_words_is_named(
    tmp_path: Path, env: type[Bandit], problem: str
) -> None:
    name = f"{env.__module__}:{env.__name__}"
    with pytest.raises(ConfigError, match=rf"^env\.name: .* cannot name its words: {problem}"):
        prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}", f"env.name={name}"))


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (0, ["learner.device=cuda"], "learner.device: needs GPU 0, and no GPU is visible here"),
        (0, ["launch.gpus.learner=[0]"], "launch.gpus.learner: needs GPU 0, and no GPU is visible"),
        (0, ["weights.kind=cuda_ipc"], "weights.kind: is cuda_ipc, and no GPU is visible here"),
        (2, ["engine.device=cuda:2"], "engine.device: needs GPU 2, of 2 visible here, counted"),
        (2, ["launch.gpus.actors=[0, 2]"], "launch.gpus.actors: needs GPU 2, of 2 visible here"),
        (2, ["learner.ranks=4"], "learner.ranks: needs GPU 3, of 2 visible here, counted from 0"),
    ],
)
def test_a_gpu_that_is_not_here_is_refused_by_its_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    changes: list[str],
    message: str,
) -> None:
    """With device=auto the processes would train on the CPU, and say nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        prepare.main(arguments(tmp_path, *changes))


def test_parts_of_a_gpu_are_counted_by_their_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process one of them, and the launcher gives each process its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    asked = [
        "launch.gpus={actors: [0], learner: [1]}",
        "actors.count=1",
        "policy.path=anywhere",
        "policy.dtype=float32",
    ]
    with pytest.raises(ConfigError, match=r"^policy\.path: "):
        prepare.main(arguments(tmp_path, *asked))


def test_the_gpus_of_a_cluster_are_not_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["launch={kind: ray, ray: {learner_gpus: 1}}", "learner.device=cuda"]
    asked += ["learner.token_budget=0", "policy.path=anywhere", "policy.dtype=float32"]
    with pytest.raises(ConfigError, match=r"^policy\.path: "):
        prepare.main(arguments(tmp_path, *asked))


def test_a_directory_without_an_embedder_is_refused(tmp_path: Path) -> None:
    """The service of experience would fail, and the run would go on unguided."""
    guided = ["experience.kind=contrast", f"experience.embedder={tmp_path}"]
    with pytest.raises(ConfigError, match=r"^experience\.embedder: "):
        prepare.main(arguments(tmp_path, *guided))
