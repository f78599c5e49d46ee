"""Low-rank adapters: linears W of a model become W + (alpha / rank) · B·A, with W frozen.

arXiv 2106.09685. Only A and B are trained, published and saved in checkpoints; an engine merges
them into the weights for which they were made, or serves them beside these. Channels and runs do
not live here.

Shapes: `I` inputs and `O` outputs of a linear, `R` rank.
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from evolver_async.files import follow_umask
from evolver_async.model.cpu.products import SHORT, ShortLinear, rounded
from evolver_async.model.policy import ModelError, load_model, split_model, state_tensors
from evolver_async.randomness import key

DOWN, UP = "lora_A", "lora_B"  # PEFT's names
BASE = "lora_base"  # buffer with the fingerprint of the weights under the adapters
FINGERPRINT_BYTES = 16
SAMPLED = 256  # elements of each weight that its fingerprint reads


class LoraLinear(nn.Linear):
    """Linear with an adapter; it shares weight and bias, now frozen, with the linear it replaces.

    lora_A [R, I] is uniform in ±1/√I by `seed`, lora_B [O, R] zero: at first it equals the plain
    linear. Both are float32 for any type of the base, and are cast to the type of the input. In
    place of a `ShortLinear` its product is that of the merged weight, rounded as engines round it.
    """

    def __init__(self, plain: nn.Linear, *, rank: int, scale: float, seed: int) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        for parameter in plain.parameters():
            parameter.requires_grad_(False)
        self.scale = scale
        self.short = isinstance(plain, ShortLinear)
        draws = torch.Generator().manual_seed(seed)
        bound = plain.in_features**-0.5
        down_RI = torch.empty(rank, plain.in_features).uniform_(-bound, bound, generator=draws)
        device = plain.weight.device
        self.lora_A = nn.Parameter(down_RI.to(device))
        self.lora_B = nn.Parameter(torch.zeros(plain.out_features, rank, device=device))

    def forward(self, input: Tensor) -> Tensor:
        if self.short:
            merged_OI = rounded(self.lora_A, self._merged, self.lora_B)
            factors = self.lora_A, self.lora_B, merged_OI, self.scale
            product = ShortLoraProduct.apply(input, *factors)
            assert isinstance(product, Tensor)
            return product if self.bias is None else product + self.bias
        low = F.linear(input, self.lora_A.to(input.dtype))
        change = F.linear(low, self.lora_B.to(input.dtype))
        return F.linear(input, self.weight, self.bias) + self.scale * change

    def _merged(self) -> Tensor:
        return merged(self.weight, self.lora_B.detach(), self.lora_A.detach(), self.scale)


class ShortLoraProduct(torch.autograd.Function):
    """Linear map by a merged and rounded weight, whose gradient goes to the factors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down_RI: Tensor, up_OR: Tensor, merged_OI: Tensor, scale: float
    ) -> Tensor:
        short = x.to(SHORT)
        ctx.save_for_backward(short, down_RI, up_OR, merged_OI)
        ctx.scale = scale
        return F.linear(short, merged_OI).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, down_RI, up_OR, merged_OI = ctx.saved_tensors
        short = gradients[0].to(SHORT)
        rows_NI, grad_NO = x.flatten(0, -2).float(), gradients[0].flatten(0, -2)
        for_down = (grad_NO @ up_OR).T @ rows_NI * ctx.scale
        for_up = grad_NO.T @ (rows_NI @ down_RI.T) * ctx.scale
        for_x = (short @ merged_OI).float() if ctx.needs_input_grad[0] else None
        return for_x, for_down, for_up, None, None


def merged(weight_OI: Tensor, up_OR: Tensor, down_RI: Tensor, scale: float) -> Tensor:
    """Return the float32 weight that an adapter makes of a linear's."""
    return torch.addmm(weight_OI.detach().float(), up_OR, down_RI, alpha=scale)


def inject(
    model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int
) -> list[str]:
    """Freeze the model and add adapters to its target linears; return their names.

    `targets` are last parts of names (`q_proj`, `mlp.up_proj`); without any, all linears of the
    decoder are targets. ModelError for a target that names no linear. From then on `state_tensors`
    returns the adapters and a fingerprint of the weights under them.
    """
    chosen = _linears(model, targets)
    base = fingerprint(state_tensors(model))
    model.requires_grad_(False)
    for name, linear in chosen.items():
        adapted = LoraLinear(linear, rank=rank, scale=alpha / rank, seed=key(seed, "lora", name))
        model.set_submodule(name, adapted)
    model.register_buffer(BASE, base.to(next(model.parameters()).device))
    return list(chosen)


def shapes(model: nn.Module, *, rank: int, targets: Sequence[str]) -> dict[str, torch.Size]:
    """Return the shapes of the adapters of a plain model by the names of `state_tensors`."""
    found = {BASE: torch.Size([FINGERPRINT_BYTES])}
    for name, linear in _linears(model, targets).items():
        found[f"{name}.{DOWN}"] = torch.Size([rank, linear.in_features])
        found[f"{name}.{UP}"] = torch.Size([linear.out_features, rank])
    return found


def _linears(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the target linears by name. Raise ModelError for a target that names none."""
    decoder, _ = split_model(model)
    inside = set(decoder.modules())
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in inside
    }
    for target in targets:
        if not any(_matches(name, target) for name in linears):
            raise ModelError(f"policy.lora.targets: no linear of the decoder is named {target}")
    if not linears:
        raise ModelError("policy.lora.rank: must be 0, as the model's decoder has no linear")
    return {
        name: linear
        for name, linear in linears.items()
        if not targets or any(_matches(name, target) for target in targets)
    }


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> Tensor:
    """Compute uint8[16] by which two processes compare their base weights, of any type.

    It covers names, shapes and a sample of the numbers.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for name, tensor in sorted(tensors.items()):
        flat_N = tensor.reshape(-1)
        sample = flat_N[:: max(1, len(flat_N) // SAMPLED)].to(torch.bfloat16)
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def check_base(adapters: Mapping[str, Tensor], base: Tensor) -> None:
    """Raise ModelError unless adapters belong to the weights with the fingerprint `base`."""
    expected = adapters.get(BASE)
    if expected is None or not torch.equal(expected.cpu().to(torch.uint8), base):
        raise ModelError(
            "policy.path: holds other weights than those that the adapters were trained on"
        )


@torch.no_grad()
def merge(
    base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Merge adapters into `base`; return whole weights in its types and on its devices.

    Only adapted weights are new tensors. ModelError if the adapters belong to other weights.
    """
    check_base(adapters, fingerprint(base))
    adapters = {name: tensor for name, tensor in adapters.items() if name != BASE}
    found = dict(base)
    for name in [name for name in adapters if name.endswith(f".{DOWN}")]:
        linear = name.removesuffix(f".{DOWN}")
        weight_OI = base.get(f"{linear}.weight")
        down_RI, up_OR = adapters.pop(name), adapters.pop(f"{linear}.{UP}", None)
        if weight_OI is None or up_OR is None:
            raise ModelError(f"weight {linear} of the adapters is unknown or incomplete")
        if (up_OR.shape[0], down_RI.shape[1]) != weight_OI.shape or len(down_RI) != up_OR.shape[1]:
            raise ModelError(f"adapter of {linear} does not fit {list(weight_OI.shape)}")
        down_RI, up_OR = (part.to(weight_OI.device).float() for part in (down_RI, up_OR))
        whole_OI = merged(weight_OI, up_OR, down_RI, scale)
        found[f"{linear}.weight"] = whole_OI.to(weight_OI.dtype)
    for name in adapters:
        raise ModelError(f"weight {name} of the adapters is unknown")
    return found


def fingerprint_of(directory: str, names: Iterable[str], dtype: str) -> Tensor:
    """Compute the fingerprint of the weights `names` of a policy directory.

    Its files are mapped, so that only the sampled pages are read. A model whose weights have other
    names in the files is loaded instead.
    """
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for path in sorted(Path(directory).glob("*.safetensors")):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise ModelError(f"{path}: is no file of tensors: {error}") from None
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = {name: tensors[name] for name in names if name in tensors}
        if len(found) == len(set(names)):
            return fingerprint(found)
    return fingerprint(state_tensors(load_model(directory, dtype=dtype, device="cpu")))


def twin(model: nn.Module) -> nn.Module:
    """Copy the trained weights of a model; the copy shares the frozen ones."""
    frozen = {id(one): one for one in model.parameters() if not one.requires_grad}
    return copy.deepcopy(model, memo=frozen)


def save_peft(
    directory: Path,
    adapters: Mapping[str, Tensor],
    *,
    name: str,
    rank: int,
    alpha: float,
    base: str,
) -> None:
    """Write the adapters as a directory that the `peft` library loads on the model at `base`.

    The file's metadata carry `name`, by which a server tells them from those of other runs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    linears = sorted({name.rpartition(".")[0] for name in adapters if name != BASE})
    tensors = {
        f"base_model.model.{linear}.{part}.weight": adapters[f"{linear}.{part}"].contiguous().cpu()
        for linear in linears
        for part in (DOWN, UP)
    }
    path = directory / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "name": name})
    follow_umask(path)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": linears,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
