"""Weights become a model's own without a copy; what must be converted is converted aside."""

import asyncio
import threading

import pytest
import torch
from torch import nn

from actors.engines.decoding.adoption import adopt, prepare
from evolver_async.model.policy import ModelError, pair_state


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, bias=False))
    made.register_buffer("mean", torch.zeros(4))
    return made


def weights(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(one.shape, value, dtype=dtype)
        for name, one in model().state_dict().items()
    }


def test_tensors_of_the_same_type_are_the_models_own_from_then_on() -> None:
    made, new = model(), weights(2.0)
    parameters = dict(made.named_parameters())
    asyncio.run(adopt(pair_state(made, new), lambda: None))
    for name, one in made.state_dict().items():
        assert one.data_ptr() == new[name].data_ptr()
    assert all(one is parameters[name] for name, one in made.named_parameters())
    out = made(torch.ones(1, 4))
    assert bool((out == (4 * 2 + 2) * 3 * 2).all())


def test_other_types_are_converted_in_a_thread_and_all_tensors_change_at_once() -> None:
    made, new = model(), weights(2.0, torch.bfloat16)
    new["mean"] = new["mean"].float()
    seen: list[set[float]] = []

    async def look() -> None:
        adopting = asyncio.ensure_future(adopt(pair_state(made, new), lambda: None))
        while not adopting.done():
            seen.append({float(one.flatten()[0]) for one in made.state_dict().values()})
            await asyncio.sleep(0)

    for one in made.state_dict().values():
        one.fill_(1.0)
    asyncio.run(look())
    assert all(len(values) == 1 for values in seen)
    assert {one.dtype for one in made.state_dict().values()} == {torch.float32}
    assert all(bool((one == 2).all()) for one in made.state_dict().values())


def test_a_cancelled_adoption_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made, new = model(), weights(2.0, torch.bfloat16)
    begun, go = threading.Event(), threading.Event()

    def slowly(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> object:
        begun.set()
        assert go.wait(60)
        return prepare(pairs)

    monkeypatch.setattr("actors.engines.decoding.adoption.prepare", slowly)
    renewed: list[bool] = []

    async def cancel() -> None:
        adopting = asyncio.ensure_future(adopt(pair_state(made, new), lambda: renewed.append(True)))
        await asyncio.to_thread(begun.wait, 60)
        adopting.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await adopting

    asyncio.run(cancel())
    assert renewed == [True]
    assert all(bool((one == 2).all()) for one in made.state_dict().values())


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    made, new = model(), weights(2.0)
    del new["mean"]
    with pytest.raises(ModelError, match="mean is missing"):
        pair_state(made, new)
    new["mean"] = torch.zeros(5)
    with pytest.raises(ModelError, match=r"mean has shape \[5\]"):
        pair_state(made, new)
