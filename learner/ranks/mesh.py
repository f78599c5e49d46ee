"""Ranks of a learner: processes that share one model, its optimizer and every batch.

Weights, gradients and moments are sharded over them by FSDP2: a layer's weights are gathered where
it is computed and dropped behind it. All ranks hold the same batch and repeat the computations on
the CPU; forward passes are divided among them, gradients summed. So the loss is that of a single
rank. Rank 0 alone knows the rest of the run (see `follow`).

All calls are collective: every rank makes the same ones in the same order. A rank that dies or is
silent for longer than the deadline ends the others with an error.
"""

import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from evolver_async.config import ConfigError
from evolver_async.model import policy
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.context import ContextGroup
from evolver_async.schema import Array
from evolver_async.weights.collective.process_group import environment, gpu_id
from learner.data.batch import MicroBatch, Minibatch
from learner.data.packing import Layout, RowCost
from learner.pass_progress import StepAbandoned, StepProgress
from learner.ranks.layer_times import LayerTimes
from learner.ranks.meeting import Meeting

T = TypeVar("T")

ENDLESS = timedelta(days=365)  # between calls of rank 0
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(eq=False)
class Ranks:
    """This process among `count` ranks; without a mesh it is alone and all calls are trivial.

    `copies`: of the weights, each shared by equally many ranks in a row; a mesh of several has two
    dimensions, and ranks at the same place of different copies hold the same share.
    `context`: ranks in a row that compute each row of tokens together; None if each does so alone.
    `host`: group for data in host memory, with the deadline; `calls`: group for calls of rank 0.
    `progress`: of this rank's passes; `layers`: times of its own computations; `cost`: of rows in
    passes of the policy.
    """

    device: torch.device
    rank: int = 0
    count: int = 1
    copies: int = 1
    mesh: DeviceMesh | None = None
    context: ContextGroup | None = None
    host: dist.ProcessGroup | None = None
    calls: dist.ProcessGroup | None = None
    progress: StepProgress = field(default_factory=StepProgress)
    layers: LayerTimes = field(default_factory=LayerTimes)
    cost: RowCost = field(default_factory=RowCost)

    @property
    def shards(self) -> int:
        """The number of ranks that share the copy of which rank 0 has a share."""
        return self.count // self.copies

    @property
    def together(self) -> int:
        """The number of ranks that compute each row of tokens together."""
        return 1 if self.context is None else self.context.count

    def shared(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch as the ranks of the context compute it together."""
        if self.context is None or micro.borders is None:
            return micro
        return replace(micro, borders=replace(micro.borders, context=self.context))

    def shard(
        self, model: torch.nn.Module, *, master: bool, dtype: str, drops: bool = False
    ) -> torch.nn.Module:
        """Shard a model's weights over the ranks by decoder layer; do nothing on a single rank.

        `master`: trained weights are kept in float32 and computed in `dtype`, gradients are summed
        in float32; other weights keep their type. `drops`: weights outside of the layers are
        dropped behind a forward pass, too; otherwise by `within`.
        """
        if self.mesh is None:
            return model
        mixed = MixedPrecisionPolicy()
        if master and dtype != "float32":
            mixed = MixedPrecisionPolicy(
                param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32
            )
        layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
        setattr(model, "within", types.MethodType(lambda _, compute: compute(), model))  # noqa: B010
        for module in (*layers, model):
            for weight in module.parameters():
                if master and weight.requires_grad and weight.dtype != torch.float32:
                    weight.data = weight.data.float()
            fully_shard(
                module,
                mesh=self.mesh,
                mp_policy=mixed,
                reshard_after_forward=True if drops else None,
            )
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # losses are shares of the update: sum them
            module.set_force_sum_reduction_for_comms(True)
        for layer in layers:
            self.layers.watch(layer)
        register_fsdp_forward_method(model, "within")
        return model

    def passes(
        self, minibatch: Minibatch, limit: int, layout: Layout
    ) -> Iterator[MicroBatch | None]:
        """Yield this rank's micro-batches of at most `limit` tokens, and count those done.

        Ranks that compute rows together get the same, of at most `limit` tokens each. Every rank
        gets equally many, None if none is left. StepAbandoned on all ranks before one of them if
        the first rank stops within a step.
        """
        limit *= self.together
        if layout != "packed":  # packed rows are dealt evenly
            limit = self.budget(limit, partial(minibatch.laid_lengths, layout))
        share = self.rank // self.together, self.count // self.together, self.cost
        for micro in minibatch.shared_micro_batches(limit, self.device, layout, *share):
            if self.largest(int(self.progress.abandons())):
                raise StepAbandoned
            yield None if micro is None else self.shared(micro)
            if micro is not None:
                tokens = micro.tokens_BT.numel()
                self.progress.count(tokens, gradient=torch.is_grad_enabled())

    def plan(self, minibatch: Minibatch, layout: Layout, *, gradient: bool) -> None:
        """Plan this rank's share of a pass over a minibatch."""
        tokens = int(minibatch.laid_lengths(layout).sum()) * self.together // self.count
        self.progress.plan(tokens, gradient=gradient)

    def budget(self, limit: int, lengths: Callable[[], Array]) -> int:
        """Return tokens of a forward pass, `limit` at most, so that every rank gets some of them.

        lengths: returns the tokens that each row adds to those before it, the longest row whole;
        called with several ranks only. What rows share is laid out again in every pass.
        """
        count = self.count // self.together
        if count == 1:
            return limit
        length_R = lengths()
        if not len(length_R):
            return limit
        total, longest = int(length_R.sum()), int(length_R.max())
        whole = longest + (total - longest) // count
        return min(limit, max(total // count + longest // 2, whole))

    def sum(self, *arrays: Array) -> None:
        """Replace arrays by their sums over ranks."""
        if self.host is not None:
            for array in arrays:
                dist.all_reduce(torch.from_numpy(array), group=self.host)

    def sum_passes(self, *arrays: Array) -> None:
        """Replace arrays that each rank filled by its `passes` by their sums over ranks."""
        if self.context is not None and self.context.rank > 0:
            for array in arrays:
                array[:] = 0
        self.sum(*arrays)

    def largest(self, value: int) -> int:
        """Return the largest value of all ranks."""
        if self.host is None:
            return value
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.host)
        return int(found)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, in their order."""
        if self.host is None:
            return [data]
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.count)]
        dist.all_gather(sizes, size, group=self.host)
        padded = torch.zeros(max(1, *(int(one) for one in sizes)), dtype=torch.uint8)
        padded[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        found = [torch.zeros_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded, group=self.host)
        return [part[: int(one)].numpy().tobytes() for part, one in zip(found, sizes, strict=True)]

    def layer_times(self) -> list[Array]:
        """Return the sums of each rank's `LayerTimes` after a step, [] for one alone."""
        if self.count == 1:
            return []
        gathered = self.gather(self.layers.drain().tobytes())
        return [np.frombuffer(sums) for sums in gathered]

    def tell(self, data: bytes) -> None:
        """Send data from rank 0 to the others, which `hear` it."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.calls)
        dist.broadcast(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), 0, group=self.host)

    def hear(self) -> bytes:
        """Return the next data of rank 0, without a deadline; RuntimeError if it is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self.calls)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.host)
        return data.numpy().tobytes()

    def leave(self, *, failed: bool = False) -> None:
        """Destroy the groups; no other call is possible afterwards.

        Gloo's threads end with the last reference to a group, and must end before Python does: one
        that lets go of a tensor later aborts the process. After a failure this does not wait for
        the others: a process that ends with a broken group can crash, and then its exit code hides
        the cause.
        """
        if self.mesh is not None and failed:
            dist.distributed_c10d._abort_process_group()
        elif self.mesh is not None:
            dist.destroy_process_group()
            self.mesh = self.host = self.calls = self.context = None
            gc.collect()  # what a sharded model holds, in cycles


def alone(device: str) -> Ranks:
    """Make the only rank of a learner, on `device` (`auto`: CUDA, if there is one)."""
    return Ranks(_device(device, 0))


def join(
    meeting: Meeting,
    rank: int,
    count: int,
    *,
    device: str,
    deadline_s: float,
    here: int | None = None,
    copies: int = 1,
    together: int = 1,
    nccl_leaves: bool = False,
    agreed: Callable[[Store, int], None] = lambda store, rank: None,
) -> Ranks:
    """Meet the other ranks; `here` is this one's number among those of its host, if there are
    several hosts. `together`: ranks that compute each row of tokens, a divisor of their number.

    They use gloo over the interface of the meeting, and NCCL on GPUs, because gloo lacks
    operations of FSDP2 there. `nccl_leaves`: this process will use NCCL to reach other hosts, too.
    NCCL keeps the interface that it uses first, so then it chooses one, or NCCL_SOCKET_IFNAME does.
    `agreed`: raises if this rank and rank 0 cannot work together, before they connect.
    """
    where = _device(device, rank if here is None else here)
    nccl = where.type == "cuda"
    deadline = timedelta(seconds=deadline_s)
    if nccl:
        torch.cuda.set_device(where)
    store = meeting.store(rank, count, deadline)
    agreed(store, rank)
    meeting.assemble(store, rank, count, deadline)
    if nccl:
        check_apart(store, rank, count, gpu_id(str(where)))
    names = [GLOO_INTERFACE] if nccl_leaves else [GLOO_INTERFACE, NCCL_INTERFACE]
    with environment(dict.fromkeys(names, meeting.interface())):
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=deadline,
            device_id=where if nccl else None,
        )
        host = dist.new_group(backend="gloo", timeout=deadline)
        calls = dist.new_group(backend="gloo", timeout=ENDLESS)
        mesh = _mesh(where.type, rank, count, copies, deadline)
        context = _context(rank, count, together, deadline)
    assert isinstance(host, dist.ProcessGroup) and isinstance(calls, dist.ProcessGroup)
    return Ranks(where, rank, count, copies, mesh, context, host, calls)


def _mesh(kind: str, rank: int, count: int, copies: int, deadline: timedelta) -> DeviceMesh:
    """Arrange the ranks; init_device_mesh can make groups of its own, which have no deadline."""
    if copies == 1:
        world = dist.group.WORLD
        assert world is not None
        return DeviceMesh.from_group(world, kind)
    places_CS = torch.arange(count).view(copies, -1)
    own: list[dist.ProcessGroup] = []  # that across the copies, then that within one
    for line in (*places_CS.T.tolist(), *places_CS.tolist()):
        group = dist.new_group(line, timeout=deadline)
        if rank in line:
            assert isinstance(group, dist.ProcessGroup)
            own.append(group)
    return DeviceMesh.from_group(own, kind, mesh=places_CS, mesh_dim_names=("copies", "shards"))


def _context(rank: int, count: int, together: int, deadline: timedelta) -> ContextGroup | None:
    if together == 1:
        return None
    found: ContextGroup | None = None
    for first in range(0, count, together):
        group = dist.new_group([*range(first, first + together)], timeout=deadline)
        if rank // together == first // together:
            assert isinstance(group, dist.ProcessGroup)
            found = ContextGroup(group, rank - first, together)
    return found


def check_apart(store: Store, rank: int, count: int, gpu: str) -> None:
    """Raise ConfigError if another rank has `gpu`, too: NCCL would fail without the reason."""
    store.set(f"gpu/{rank}", gpu)
    for other in range(count):
        if other != rank and store.get(f"gpu/{other}") == gpu.encode():
            raise ConfigError(
                f"launch.gpus.learner: ranks {min(rank, other)} and {max(rank, other)} see the same"
                " GPU; NCCL needs one for each: name as many GPUs as there are ranks"
            )


def within(model: torch.nn.Module, compute: Callable[[], T]) -> T:
    """Call `compute`, which can use a sharded model and its parts as if it were whole.

    One backward pass can start at any tensor in the result.
    """
    if not isinstance(model, FSDPModule):
        return compute()
    found = getattr(model, "within")(compute)  # noqa: B009
    if not torch.is_grad_enabled():
        # With gradients the backward pass drops weights outside of the layers, and FSDP2's records
        # of forward passes, which otherwise grow without end.
        _forget_passes(model)
    return found


def _forget_passes(model: FSDPModule) -> None:
    """Shard the weights again, and forget the forward passes of this iteration."""
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    root = getattr(model, "_get_fsdp_state")()  # noqa: B009 -- torch 2.11, which has no such call
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        if (group := state._fsdp_param_group) is not None:
            group.reshard()
            group._post_forward_indices.clear()


def idle(model: torch.nn.Module, device: torch.device, *, packed: bool) -> None:
    """Take part in a scoring pass of the other ranks."""
    within(model, lambda: nothing(model, device, packed=packed))


def nothing(
    model: torch.nn.Module, device: torch.device, *, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, Borders | None]:
    """Return two tokens, their hidden states, which depend on all weights, and their borders."""
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    borders = Borders.of([2], device) if packed else None
    hidden_BTD = policy.hidden_states(model, tokens_BT, borders)
    _, head = policy.split_model(model)
    return tokens_BT, hidden_BTD + 0 * head(hidden_BTD).sum(), borders


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor from all ranks; return any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device(name: str, rank: int) -> torch.device:
    """Return the device of a rank: the GPU of its number, or the only one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":  # a process group needs the number
        return torch.device("cuda", rank if torch.cuda.device_count() > 1 else 0)
    return torch.device(name)
