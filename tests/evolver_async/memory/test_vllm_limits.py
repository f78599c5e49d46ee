"""What vLLM would refuse half a minute after the start is refused before it, by key and number."""

import tempfile
from dataclasses import replace

import pytest

from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.config.shape import DecoderShape
from evolver_async.launch.start_checks import problems_of
from evolver_async.memory import vllm_limits
from evolver_async.memory.vllm_limits import CPU_KV_BYTES, check_vllm, cpu_kv_bytes

VLLM = ["stages=[{steps: 1}]", "engine.kind=vllm", "engine.prefill_tokens=8192"]
WIDE = ["policy.hidden_size=64", "policy.heads=2"]
SMOL = DecoderShape(30, 576, 1536, 9, 3, 64, 49152, tied=True)
SMOL_CONTEXT = 46080 * (4096 + 32)  # bytes of a token, tokens of a context and of one more block


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["policy.hidden_size=64", "policy.heads=4"], r"^policy\.heads: .* have 16 "),
        ([*WIDE, "engine.tensor_parallel=3"], r"^engine\.tensor_parallel: 3 .* 2 attention heads"),
        ([*WIDE, "engine.tensor_parallel=2"], ""),
        (WIDE, ""),
    ],
)
def test_a_shape_that_vllm_cannot_run_on_a_cpu_is_refused(
    arguments: list[str], refused: str
) -> None:
    config = load(None, [*VLLM, "engine.device=cpu", *arguments])
    if not refused:
        return check_vllm(config, gpu=False)
    with pytest.raises(ConfigError, match=refused):
        check_vllm(config, gpu=False)
    assert any(one.startswith(refused[1:7].replace("\\", "")) for one in problems_of(config)), (
        "doctor has it from the checks of a start"
    )
    check_vllm(replace(config, engine=replace(config.engine, kind="torch")), gpu=False)


def test_whole_weights_of_experts_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_limits, "shape_of", lambda _: replace(SMOL, experts=4, active=2))
    config = load(None, VLLM)
    with pytest.raises(ConfigError, match=r"^engine\.kind: .* experts"):
        check_vllm(config, gpu=False)
    check_vllm(config, gpu=True)
    config.policy.lora.rank = 4  # adapters alone are replaced
    check_vllm(config, gpu=False)
    config.engine.merge_lora = True
    with pytest.raises(ConfigError, match=r"^engine\.kind: "):
        check_vllm(config, gpu=False)


def test_a_cache_that_holds_no_context_is_refused_and_the_default_holds_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_limits, "shape_of", lambda _: SMOL)
    long = [*VLLM, "policy.max_length=4096", "learner.token_budget=4096"]
    config = load(None, [*long, f"engine.kv_cache_bytes={CPU_KV_BYTES}"])
    with pytest.raises(ConfigError, match=rf"^engine\.kv_cache_bytes: .* {SMOL_CONTEXT} "):
        check_vllm(config, gpu=False)
    config.engine.kv_cache_bytes = SMOL_CONTEXT
    check_vllm(config, gpu=False)
    config.engine.kv_cache_bytes, config.engine.slots = 0, 2
    assert cpu_kv_bytes(config, SMOL) == SMOL_CONTEXT
    config.engine.slots = 64
    assert cpu_kv_bytes(config, SMOL) == 64 * 512 * 46080, "each slot is of some use"
    config.engine.tensor_parallel = 3
    assert cpu_kv_bytes(config, SMOL) == 64 * 512 * 46080 // 3
    config.policy.max_length = 64
    assert cpu_kv_bytes(config, replace(SMOL, layers=1)) == CPU_KV_BYTES


def test_a_temporary_directory_too_long_for_vllms_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(None, [*VLLM, *WIDE])
    monkeypatch.delenv(vllm_limits.SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/".ljust(70, "t"))
    check_vllm(config, gpu=True)
    monkeypatch.setattr(tempfile, "tempdir", "/".ljust(71, "t"))
    with pytest.raises(ConfigError, match=r"^engine\.kind: .* \(TMPDIR\), .* 71 bytes"):
        check_vllm(config, gpu=True)
    monkeypatch.setenv(vllm_limits.SOCKETS, "/tmp")
    check_vllm(config, gpu=True)
