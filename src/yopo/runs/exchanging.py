"""How the processes of a run share its training: one flat message, DDP or FSDP2."""

from collections import Counter

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from yopo.methods.registry import ENTRIES
from yopo.runs.settings import Config


def check(config: Config) -> None:
    """Refuse what cannot be trained in this way."""
    method, way = ENTRIES[config.method.name].method, config.parallel
    if way != "flat" and method.layer_by_layer:
        raise ValueError(
            f"{method.__name__} runs the network layer by layer, which --parallel {way} does not "
            "see; leave it out, or say flat"
        )


def wrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel; each process's statistics stay its own."""
    made = DistributedDataParallel(model)
    made.broadcast_buffers = False  # as an argument it has another name from torch 2.13 on
    return made


def spread(model: nn.Module) -> None:
    """Spread the weights over all processes by FSDP2: block by block, and what is left."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of a kind that the network repeats, as residual blocks are.

    Containers, which have no forward pass of their own, and single layers are none.
    """
    made = [m for m in model.modules() if m is not model and any(True for _ in m.children())]
    many = Counter(type(m) for m in made if not _contains(m))
    outermost: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if many[type(child)] > 1 and next(child.parameters(), None) is not None:
                outermost.append(child)
            else:
                look(child)

    look(model)
    return list(dict.fromkeys(outermost))


def _contains(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
