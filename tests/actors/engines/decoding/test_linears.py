"""Merged linear maps give what the modules give, for any number of rows."""

import pytest
import torch
from torch import nn

from actors.engines.decoding.linears import Linear, Linears


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)])
def test_results_are_those_of_the_modules(copied: bool, biases: tuple[bool, bool]) -> None:
    modules = [nn.Linear(32, 48, biases[0]), nn.Linear(32, 16, biases[1])]
    with torch.inference_mode():
        joined = Linears(modules, copied)
        for rows in (1, 16, 4096):
            x = torch.randn(rows, 32)
            expected = torch.cat([module(x) for module in modules], 1)
            assert torch.allclose(joined(x), expected, atol=1e-5)
            memory = torch.randn(rows, 64)
            assert torch.allclose(joined(x, memory), expected, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_a_map_is_added_in_place(bias: bool) -> None:
    module = nn.Linear(32, 48, bias)
    with torch.inference_mode():
        linear = Linear(module.weight, module.bias)
        for rows in (1, 16, 4096):
            x, to = torch.randn(rows, 32), torch.randn(rows, 48)
            expected = to + module(x)
            linear.add(x, to)
            assert torch.allclose(to, expected, atol=1e-5)
