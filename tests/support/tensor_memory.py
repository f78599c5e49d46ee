"""The memory that tensors take while a piece of code runs, counted by torch's own dispatch."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Peak(TorchDispatchMode):
    """Bytes of all tensors made inside this context and alive: `now`, and `most` at any moment.

    What existed before does not count, nor do buffers that operators keep to themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage(), 0)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._see(storage, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        place = id(storage)
        if place in self._alive:
            return

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.now -= size
            del self._alive[place]

        self.now += size
        self._alive[place] = weakref.ref(storage, gone)


SPARSE = ("aten.gather", "aten.scatter_add", "aten.scatter_add_")
FREE = ("aten.empty_like", "aten.new_empty", "aten.empty", "aten._unsafe_view")


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write inside this context, views left out.

    `products`: of matrices, with their FLOPs in `flops`; `rest`: of all others. `largest`: numbers
    in the largest tensor of `columns` columns that was written.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.products = self.rest = self.flops = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        name = func.overloadpacket
        if func.is_view:
            return out
        read = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        if str(name) in SPARSE:
            read, made = read[1:], read[1:]  # as many places as there are indices
        moved = sum(one.nbytes for one in (*read, *made))
        if name in flop_registry:
            self.flops += flop_registry[name](*args, out_val=out)
            self.products += moved
        elif str(name) not in FREE:
            self.rest += moved
        widths = [one.numel() for one in made if one.ndim == 2 and one.shape[1] == self.columns]
        self.largest = max(self.largest, *widths, 0)
        return out
