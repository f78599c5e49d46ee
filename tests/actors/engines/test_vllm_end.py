"""End of a vLLM, with a fake in its place: its running requests are told of it, and the last of its
restarts says why."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engines.vllm_core import EngineDied, EngineUseless, VllmCore
from actors.engines.vllm_failures import FILE


class EngineDead(Exception):
    """In place of vLLM's EngineDeadError."""


class FakeLlm:
    """Answers requests from a queue, and no longer after `shutdown`, as AsyncLLM does.

    `broken`: as a version of vLLM without the method that tells requests of an error.
    """

    dead_error = EngineDead()

    def __init__(self, broken: bool = False) -> None:
        self.answers: asyncio.Queue[Exception] = asyncio.Queue()
        self.output_processor: Any = None if broken else self
        self.ended = False

    def propagate_error(self, error: Exception) -> None:
        assert not self.ended, "the requests are told before the shutdown"
        self.answers.put_nowait(error)

    def shutdown(self) -> None:
        self.ended = True

    async def generate(self) -> None:
        raise await self.answers.get()


def core_of(llm: FakeLlm) -> VllmCore:
    core = object.__new__(VllmCore)
    core._llm, core._settled, core._directory = llm, True, Path("/nowhere")  # type: ignore[assignment]
    return core


def test_requests_of_a_lost_vllm_end_with_its_error() -> None:
    async def lose() -> None:
        llm = FakeLlm()
        request = asyncio.create_task(llm.generate())
        await asyncio.sleep(0)
        core_of(llm).lose(llm)  # type: ignore[arg-type]
        assert llm.ended
        with pytest.raises(EngineDead):
            await asyncio.wait_for(request, 5.0)

    asyncio.run(lose())


def test_a_vllm_that_cannot_tell_its_requests_is_shut_down_all_the_same() -> None:
    async def lose() -> None:
        llm = FakeLlm(broken=True)
        core_of(llm).lose(llm)  # type: ignore[arg-type]
        assert llm.ended

    asyncio.run(lose())


@pytest.mark.parametrize(("served", "kind"), [(True, EngineDied), (False, EngineUseless)])
def test_the_last_death_names_its_cause_and_ends_the_run_if_no_turn_ever_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool, kind: type[Exception]
) -> None:
    core: Any = object.__new__(VllmCore)
    states = SimpleNamespace(directory=tmp_path)
    core.__dict__ |= {"_llm": None, "_settled": False, "_recovery": None, "_closed": False}
    core.__dict__ |= {"weights": None, "restarts": 0, "served": served, "_states": states}
    core._settings, starts = SimpleNamespace(restarts=2), list[int]()
    told = list[str]()
    core._tell = told.append

    def fail() -> None:
        starts.append(1)
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(core, "_start", fail)
    monkeypatch.setattr(core, "_new_states", lambda: states)
    (tmp_path / FILE).write_text("ValueError: no kernel for 7 bits")
    with pytest.raises(kind, match=r"3 times \(engine\.restarts\).*no kernel for 7 bits"):
        asyncio.run(core.ready())
    assert len(starts) == 2 and len(told) == 3
