"""Arguments for vLLM are refused before the start where they could not do what they say."""

import pytest

from actors.engines import vllm_options
from actors.engines.vllm_options import problems
from evolver_async.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("attention_backend", ""),
        ("atention_backend", "attention_backend"),
        ("max_num_seqs", "engine.slots"),
        ("logprobs_mode", "evolver_async"),
        ("data_parallel_size", "one engine"),
        ("hf_overrides", "policy.path"),
        ("quantization", "engine.inexact"),
        ("speculative_config", "engine.inexact"),
    ],
)
def test_an_option_is_given_or_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    known = frozenset({"attention_backend", "quantization", "speculative_config"})
    monkeypatch.setattr(vllm_options, "known_options", lambda: known)
    found = list(problems(EngineConfig(kind="vllm", options={name: 1})))
    assert [key for key, _ in found] == [f"engine.options.{name}"] * bool(problem)
    assert all(problem in text for _, text in found)
    if problem == "engine.inexact":
        assert not list(problems(EngineConfig(options={name: 1}, inexact=True)))
