"""vLLM, given nothing but an exported directory, writes what our evaluation wrote."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from exported import EPISODES, make_export, play

from actors.engines.vllm_start import ENVIRONMENT
from evolver_async.memory.vllm_limits import CPU_BLOCK, CPU_KV_BYTES

pytestmark = pytest.mark.vllm


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """End the processes that vLLM starts: it leaves them to the end of ours."""
    before = set(psutil.Process().children(recursive=True))
    yield
    found = set(psutil.Process().children(recursive=True)) - before
    started = [process for process in found if process.name().startswith("VLLM")]
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started)


@pytest.mark.usefixtures("nothing_left")
def test_vllm_writes_every_turn_of_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sampling parameters that the README of the export names."""
    exported = make_export(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    from vllm import LLM, SamplingParams

    text = (exported.directory / "README.md").read_text()
    (parameters,) = re.findall(r"(SamplingParams\(.*\))\)` writes", text)
    sampling = eval(parameters, {"SamplingParams": SamplingParams})
    (prefix,) = re.findall(r'^PREFIX = "(.*)"$', text, re.MULTILINE)
    llm = LLM(
        model=str(exported.directory),
        dtype="float32",
        max_model_len=exported.setting.max_length,
        max_num_batched_tokens=exported.setting.max_length,
        max_num_seqs=4,
        enable_chunked_prefill=False,
        enforce_eager=True,
        kv_cache_memory_bytes=CPU_KV_BYTES,
        block_size=CPU_BLOCK,
    )

    def reply(messages: list[Any]) -> str:
        (output,) = llm.chat(messages, sampling, use_tqdm=False)
        said = prefix + output.outputs[0].text
        messages.append({"role": "assistant", "content": said})
        return said

    found = [play(exported, number, reply) for number in range(EPISODES)]
    assert [texts for texts, _ in found] == exported.texts
    assert [success for _, success in found] == exported.success
