"""Products by oneDNN: what `F.linear` computes, forward and backward, and only where they pay."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from evolver_async.model import products
from evolver_async.model.products import LinearProduct, linear


def gradients(of: Tensor, *leaves: Tensor) -> list[Tensor]:
    scaled = of * torch.linspace(-1, 1, of.numel()).view_as(of)
    return list(torch.autograd.grad(scaled.sum(), leaves))


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (40, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, biased: bool
) -> None:
    monkeypatch.setattr(products, "MIN_PRODUCTS", 1)
    x = torch.randn(50, inputs, requires_grad=True)
    weight = torch.randn(outputs, inputs, requires_grad=True)
    leaves = [x, weight] + ([torch.randn(outputs, requires_grad=True)] if biased else [])
    ours, theirs = linear(*leaves), F.linear(*leaves)
    assert torch.allclose(ours, theirs, atol=1e-5)
    found, wanted = gradients(ours, *leaves), gradients(theirs, *leaves)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_gradient_that_is_not_wanted_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(products, "_of_weight", None)
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(3, 4)
    (found,) = gradients(linear(x, weight), x)
    assert torch.allclose(found, gradients(F.linear(x, weight), x)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "dtype", "taken"),
    [(1 << 10, torch.float32, True), (8, torch.float32, False), (1 << 10, torch.bfloat16, False)],
    ids=["large", "few rows", "short type"],
)
def test_only_large_products_in_float32_take_the_longer_way(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, taken: bool
) -> None:
    calls = list[int]()
    monkeypatch.setattr(LinearProduct, "apply", lambda *given: calls.append(1) or F.linear(*given))
    linear(torch.ones(rows, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype))
    assert bool(calls) is (taken and torch.backends.mkl.is_available())
