"""Networks with the paper's shapes."""

import hashlib

import pytest
import torch
from torch import nn

from yopo import Normalize, Split
from yopo.models import PreActResNet, SmallCNN, preactresnet18, resnet50, wideresnet


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts_are_those_of_the_published_networks() -> None:
    # Counted by hand from the layer shapes: see the sums.
    conv = 9 * (32 + 32 * 32 + 32 * 64 + 64 * 64) + 32 + 32 + 64 + 64
    linear = 1024 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
    assert size(SmallCNN()) == conv + linear == 312202
    with torch.device("meta"):
        assert size(preactresnet18(final_bn=False)) == 11171146  # kuangliu's PreActResNet18
        assert size(preactresnet18()) == 11171146 + 2 * 512
        assert size(wideresnet()) == 46160474  # TRADES' WideResNet


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [
        (SmallCNN(), (1, 28, 28), 10),
        (SmallCNN(7, channels=3, size=32, width=5, hidden=11, dropout=0), (3, 32, 32), 7),
        (preactresnet18(5, channels=1, width=4), (1, 32, 32), 5),
        (preactresnet18(width=4, blocks=(1, 2, 1), final_bn=False), (3, 24, 24), 10),
        (wideresnet(100, depth=16, width=1), (3, 32, 32), 100),
        (resnet50(7, channels=1, width=4, blocks=(1, 2)), (1, 64, 48), 7),
    ],
)
def test_shapes(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    assert model.double()(torch.rand(2, *shape)).shape == (2, classes)


def test_resolution_is_halved_between_stages() -> None:
    model, seen = preactresnet18(width=4), []
    for i in range(1, 5):
        model.get_submodule(f"layer{i}").register_forward_hook(
            lambda _m, _a, out: seen.append(tuple(out.shape[1:]))
        )
    model(torch.rand(1, 3, 32, 32))
    assert seen == [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]


def test_smallcnn_offers_both_first_layers() -> None:
    model, x = SmallCNN(width=4), torch.rand(2, 1, 28, 28)
    assert Split(model, "conv1").cut(x).affine
    assert not Split(model, "relu1").cut(x).affine


def test_normalize_is_affine_saved_and_checked() -> None:
    x = torch.rand(2, 3, 4, 4)
    layer = Normalize([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])
    expected = torch.stack(
        [(x[:, i] - m) / s for i, (m, s) in enumerate(((0.1, 1), (0.2, 2), (0.3, 4)))], 1
    )
    torch.testing.assert_close(layer(x), expected)
    assert set(layer.state_dict()) == {"mean", "std"}
    signal = torch.rand(2, 3, 5)
    torch.testing.assert_close(Normalize(0.5, 0.25)(signal), (signal - 0.5) * 4)
    with pytest.raises(ValueError, match="std > 0"):
        Normalize(0.5, 0.0)


def test_bad_shapes_name_the_fix() -> None:
    with pytest.raises(ValueError, match="at least 16x16"):
        SmallCNN(size=12)
    with pytest.raises(ValueError, match="6k \\+ 4"):
        wideresnet(depth=30)
    with pytest.raises(ValueError, match="as many widths as blocks"):
        PreActResNet(stem=4, widths=[4], blocks=[1, 1])


def test_resnet50_has_torchvisions_names_and_shapes() -> None:
    """Of torchvision 0.28's resnet50, whose weights then give the same logits, bit for bit."""
    with torch.device("meta"):
        net = resnet50()
    assert size(net) == 25557032
    state = net.state_dict()
    names = "".join(f"{name} {tuple(tensor.shape)}\n" for name, tensor in state.items())
    digest = "3fa57287149b51c43a043a424dcd918aaa5a894c977b50e35a9154f41f9c8fd0"
    assert hashlib.sha256(names.encode()).hexdigest() == digest, names


def test_resnet50s_blocks_begin_as_the_identity() -> None:
    block = resnet50(width=4, blocks=(2,)).double().get_submodule("layer1.1")
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(block(x), x)
