"""A pretended GPU: tensors that say that they are on cuda:0, and refuse what a GPU's refuse.

Each of them holds a tensor of the CPU, on which every operation really runs; so values are right.
An operation on tensors of both devices and `numpy` of one of the GPU raise what they raise on a
GPU, forward and backward. It knows nothing of streams, kernels and memory; a single number of the
host passes every operation, though some refuse it on a GPU, and flash attention is off.

Autograd and the operators in C++ believe that the wrappers are on the CPU: what they make for
themselves has its device from here (`dispatch`), what Python asks for has it from `Functions`.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU, HOST = torch.device("cuda:0"), torch.device("cpu")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")


class GpuTensor(Tensor):
    """A tensor on the pretended GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "GpuTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=HOST,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def data(self) -> Tensor:
        return GpuTensor(self.held.detach())

    @data.setter
    def data(self, new: Tensor) -> None:
        self.held = plain(new).detach()

    def get_device(self) -> int:
        return 0

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.held.numpy(force=True)
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.held.detach().tolist()

    def data_ptr(self) -> int:
        return 0  # a copy of a module asks for it, to see that this is no plain tensor

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


operations: Counter[str] = Counter()  # that ran on the GPU, by their names
_called: list[str] = []  # functions that Python is in, outermost first


def plain(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


def wrapped(value: Any) -> Any:
    on_host = isinstance(value, Tensor) and not isinstance(value, GpuTensor)
    return GpuTensor(value) if on_host else value


def is_gpu(device: Any) -> bool:
    if device is None or isinstance(device, int):
        return device is not None
    return torch.device(device).type == "cuda"


def dispatch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run one operator of ATen."""
    name, returns = func._schema.name, func._schema.returns
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if not any(isinstance(one, GpuTensor) for one in tensors):
        out = func(*args, **kwargs)
        # A backward formula in C++ makes its zeros where it believes the gradient to be.
        backward = not tensors and _called[:1] in (["backward"], ["grad"]) and len(_called) == 1
        return tree_map(wrapped, out) if backward else out
    operations[name] += 1
    if name not in COPIES:
        _check(name, args, tensors)
    given = {key: HOST if key == "device" else plain(one) for key, one in kwargs.items()}
    out = func(*tree_map(plain, args), **tree_map(plain, given))
    if not returns:
        return None
    if func._schema.is_mutable:  # the argument itself, not another wrapper of what it holds
        return kwargs.get("out", args[0])
    return tree_map(wrapped, out)


def _check(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Refuse tensors of both devices. A GPU takes single numbers and indices of the host."""
    if name in INDEXED:
        tensors = [args[0], *(one for one in args[2:] if isinstance(one, Tensor))]
    wrong = [tuple(one.shape) for one in tensors if not isinstance(one, GpuTensor) and one.dim()]
    if wrong:
        raise RuntimeError(f"{name}: expected all tensors on cuda:0, of shapes {wrong} are on cpu")


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Answers what Python asks for by device, so that nothing looks for a real GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _called.append(getattr(func, "__name__", ""))
        try:
            return self._answer(func, args, dict(kwargs or {}))
        finally:
            _called.pop()

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            return args[0] if func is Tensor.pin_memory else False
        if func in (Tensor.cuda, Tensor.cpu):
            return moved(args[0], GPU if func is Tensor.cuda else HOST)
        if _called[-1] == "to" and isinstance(args[0], Tensor):
            return _to(*args, **kwargs)
        if "device" not in kwargs or kwargs["device"] is None:
            return func(*args, **kwargs)
        asked = kwargs.pop("device")
        device = HOST if is_gpu(asked) else asked
        out = func(*tree_map(plain, args), device=device, **tree_map(plain, kwargs))
        return tree_map(wrapped, out) if is_gpu(asked) else out


def _to(tensor: Tensor, *rest: Any, device: Any = None, dtype: Any = None, **_: Any) -> Tensor:
    for one in rest:
        if isinstance(one, Tensor):
            device, dtype = one.device, one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, str | torch.device):
            device = one
    return moved(tensor, tensor.device if device is None else device, dtype)


def moved(tensor: Tensor, device: Any, dtype: torch.dtype | None = None) -> Tensor:
    gpu = is_gpu(device)
    if isinstance(tensor, GpuTensor) == gpu:
        return Tensor.to(tensor, dtype or tensor.dtype)
    return Move.apply(tensor, gpu, dtype or tensor.dtype)


class Move(torch.autograd.Function):
    """A copy between the devices, and of its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gpu: bool, dtype: torch.dtype) -> Tensor:
        ctx.gpu, ctx.dtype = gpu, tensor.dtype
        copy = plain(tensor).detach().to(dtype, copy=True)
        return GpuTensor(copy) if gpu else copy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        copy = plain(grad).to(ctx.dtype)
        return copy if ctx.gpu else GpuTensor(copy), None, None


class Event:
    """Stand-in for events and streams: there is one stream, and it never waits."""

    device = GPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    record = synchronize = wait = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True


PROPERTIES = SimpleNamespace(
    name="pretended", total_memory=80 << 30, major=7, minor=5, uuid="0", multi_processor_count=1
)
RUNTIME = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (7, 5),  # too old for flash attention, which is a kernel of its own
    "get_device_properties": PROPERTIES,
    "mem_get_info": (70 << 30, 80 << 30),
    "max_memory_allocated": 1 << 30,
    "memory_allocated": 1 << 30,
    "current_stream": Event(),
    "cudart": RUNTIME,
} | dict.fromkeys(
    ("check_error", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")
)


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Make this process see one GPU."""
    ties = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights come apart
    with contextlib.ExitStack() as stack:
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, ties)
        for name, answer in ANSWERS.items():
            constant = lambda *_, answer=answer, **__: answer  # noqa: E731
            stack.enter_context(patch.object(torch.cuda, name, constant))
        for name in ("Event", "Stream"):
            stack.enter_context(patch.object(torch.cuda, name, Event))
        stack.enter_context(patch.object(torch.cuda, "stream", contextlib.nullcontext))
        stack.enter_context(Functions())
        stack.enter_context(Operators())
        yield
