"""What two processes really send in a step, and what that costs each of them; `scale` runs it."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel

import yopo
from yopo.models.resnet50 import Bottleneck

WAYS = ("flat", "ddp", "fsdp", "fsdp gathered")
ROUNDS = 5
SHARE = 8  # images of a process


def network() -> nn.Module:
    """A small ResNet-50, of all its kinds of layers."""
    torch.manual_seed(0)
    return yopo.models.resnet50(10, width=8, blocks=(2, 2, 1, 1))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Images of one process."""
    torch.manual_seed(1 + rank)
    return torch.rand(SHARE, 3, 48, 48), torch.arange(SHARE)


def spread(net: nn.Module) -> nn.Module:
    """By FSDP2: each block, and what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net.modules():
        if isinstance(module, Bottleneck):
            fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def listen(net: DistributedDataParallel, sent: list[int]) -> None:
    """Note the bytes of each of its messages; it averages as before."""

    def hook(
        _state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        sent.append(buffer.numel() * buffer.element_size())
        going: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
        done: torch.futures.Future[Tensor] = going.get_future()
        return done.then(lambda future: future.value()[0])

    net.register_comm_hook(None, hook)


@contextmanager
def counted(sent: dict[str, list[int]]) -> Iterator[None]:
    """Note the bytes of what is all-reduced, gathered and reduced to parts in the block."""
    kinds: dict[str, Any] = {
        "gathered": _fsdp_collectives.DefaultAllGather,
        "scattered": _fsdp_collectives.DefaultReduceScatter,
    }
    own, reduce = {name: kind.__call__ for name, kind in kinds.items()}, dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **given: Any) -> Any:  # noqa: ANN401
        sent["reduced"].append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *args, **given)

    def of_fsdp(name: str) -> Callable[..., Any]:
        def call(
            self: object,
            output_tensor: Tensor,
            input_tensor: Tensor,
            *args: Any,  # noqa: ANN401
            **given: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            large = output_tensor if name == "gathered" else input_tensor
            sent[name].append(large.numel() * large.element_size())
            return own[name](self, output_tensor, input_tensor, *args, **given)

        return call

    try:
        dist.all_reduce = all_reduce
        for name, kind in kinds.items():
            kind.__call__ = of_fsdp(name)
        yield
    finally:
        dist.all_reduce = reduce
        for name, kind in kinds.items():
            kind.__call__ = own[name]


def one_way(way: str, rank: int) -> dict[str, Any]:
    """Messages of a step of YOPO-3-3, in bytes, and CPU seconds of this process for it."""
    sent: dict[str, list[int]] = {"reduced": [], "gathered": [], "scattered": []}
    net: nn.Module = network()
    if way == "ddp":
        net = DistributedDataParallel(net)
        listen(net, sent["reduced"])
    elif way != "flat":
        net = spread(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    if way == "flat":
        yopo.exchange_gradients(optimizer)
    method = yopo.YOPO(net, yopo.Linf(4 / 255), m=3, n=3)
    x, y = batch(rank)
    whole = yopo.gathered if way == "fsdp gathered" else (lambda _: nullcontext())

    def step() -> None:
        with whole(net):
            method.backward(x, y)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the network is studied, buckets are laid out anew
    step()
    for messages in sent.values():
        messages.clear()
    with counted(sent) if way != "ddp" else nullcontext():
        step()
    # A group of two sends what a group of one need not.
    found: dict[str, Any] = {name: list(messages) for name, messages in sent.items()}
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return found | {"seconds": statistics.median(seconds)}


def work(rank: int, port: int, out: str, world: int = 2) -> None:
    """Be one of the processes; what it found goes into out/WORLD-RANK.pt."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    found = {way: one_way(way, rank) for way in WAYS}
    torch.save(found, f"{out}/{world}-{rank}.pt")
    dist.destroy_process_group()
