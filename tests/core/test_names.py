"""`first_layer="layer1"` names the same module whatever stands around the network."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import yopo
from tests.conftest import Batch
from yopo.core.first_layer import cut_names
from yopo.core.names import module_named, said


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2)
        self.layer1 = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer1(self.conv1(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Keeps(nn.Module):
    """As frameworks do: the wrapped one, and the user's own beside it."""

    def __init__(self, network: nn.Module, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, network)
        self.first = names[0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, self.first)(x)
        return out


def part_compiled(network: Network) -> nn.Module:
    network.layer1 = torch.compile(network.layer1, backend="eager")  # type: ignore[assignment]
    return network


def part_checkpointed(network: Network) -> nn.Module:
    inside: Any = checkpoint_wrapper(network.layer1)
    network.layer1 = inside
    return network


def compiled(network: nn.Module) -> nn.Module:
    outside: Any = torch.compile(network, backend="eager")
    return outside  # type: ignore[no-any-return]


AROUND: dict[str, Callable[[Network], nn.Module]] = {
    "nothing": lambda net: net,
    "module.": lambda net: Keeps(net, "module"),
    "_orig_mod.": compiled,
    "module._orig_mod.": lambda net: Keeps(compiled(net), "module"),
    "_forward_module.module.": lambda net: Keeps(Keeps(net, "module"), "_forward_module"),
    "_forward_module. and _original_module.": lambda net: Keeps(
        net, "_forward_module", "_original_module"
    ),
    "averaged": lambda net: AveragedModel(net),
    "layer1._orig_mod.": part_compiled,
    "layer1._checkpoint_wrapped_module.": part_checkpointed,
}
around_it = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())


@around_it
@pytest.mark.parametrize("name", ["layer1", "layer1.0", "module.layer1", "_orig_mod.layer1"])
@pytest.mark.filterwarnings("ignore")  # of torch's own making, when it compiles
def test_a_first_layer_has_its_name(
    around: Callable[[Network], nn.Module], name: str, batch: Batch
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone = Network()
    bare = name.removeprefix("module.").removeprefix("_orig_mod.")
    torch.manual_seed(1)
    want = yopo.YOPO(alone, yopo.Linf(0.1), first_layer=bare).backward(*batch)
    torch.manual_seed(0)
    method = yopo.YOPO(around(Network()), yopo.Linf(0.1), first_layer=name)
    torch.manual_seed(1)
    assert torch.equal(method.backward(*batch).eta, want.eta)
    cut = method.cut(batch[0])
    assert cut is not None
    assert cut.name == bare


@around_it
@pytest.mark.filterwarnings("ignore")
def test_sentences_have_the_users_names(
    around: Callable[[Network], nn.Module], batch: Batch
) -> None:
    torch._dynamo.reset()
    model = around(Network())
    with pytest.raises(ValueError, match=r"near names: layer1, layer1\.1, layer1\.0$"):
        yopo.Split(model, "layer_1")
    with pytest.raises(ValueError, match=r"so that f0 would be the whole network; name 'conv1'"):
        yopo.Split(model, "head").cut(batch[0])
    default = yopo.Split(model).cut(batch[0])
    assert default.name == "conv1"
    assert set(cut_names(model, batch[0])) >= {"conv1", "layer1.0"}
    assert not any("mod" in name for name in cut_names(model, batch[0]))


def test_the_name_of_a_wrapper_is_no_first_layer() -> None:
    model = Keeps(Network(), "module")
    with pytest.raises(ValueError, match="no module 'module' in the model"):
        module_named(model, "module")


def test_a_module_of_the_users_own_that_has_such_a_name() -> None:
    """Beside others, or in a row, it is a part like any."""
    model = Network()
    model.module = nn.Identity()
    row = nn.Sequential()
    row.add_module("module", nn.Linear(2, 2))
    assert said(model, "module") == said(row, "module") == "module"
    assert module_named(model, "module") is model.module
    assert module_named(row, "module") is row[0]
