"""The memory that tensors take while a piece of code runs, counted by torch's own dispatch."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
