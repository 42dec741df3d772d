"""ResNet-50 with torchvision's names and shapes, so that weights go from one to the other."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

WIDER = 4  # the channels that leave a block, in those within it


class Bottleneck(nn.Module):
    """relu(x + 1x1, 3x3 and 1x1 convolutions), with BatchNorm after each.

    The 3x3 convolution has the stride ("v1.5"). x goes through a convolution where the shape
    changes.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = WIDER * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = (
            None
            if stride == 1 and channels == out
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, 4 * width, H/stride, …)
        """Apply the block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out)).relu()
        return (shortcut + self.bn3(self.conv3(out))).relu()  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A 7x7 convolution and a maximum, stages of blocks, a global average and a linear layer.

    A block begins as the identity: the last BatchNorm of each starts at 0.
    """

    def __init__(self, classes: int, *, channels: int, width: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        before = width
        for i, count in enumerate(blocks):
            inner, layers = width * 2**i, []
            for j in range(count):
                layers.append(Bottleneck(before, inner, 2 if i and j == 0 else 1))
                before = WIDER * inner
            self.add_module(f"layer{i + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.fc = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, classes)
        """Logits of x."""
        out = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, padding=1)
        for i in range(1, self.stages + 1):
            out = self.get_submodule(f"layer{i}")(out)
        return self.fc(out.mean((2, 3)))  # type: ignore[no-any-return]


def resnet50(
    classes: int = 1000,
    *,
    channels: int = 3,
    width: int = 64,
    blocks: Sequence[int] = (3, 4, 6, 3),
) -> ResNet:
    """ResNet-50, for images of 224x224 or any other size.

    classes: to tell apart. channels: of the images. width: filters of the stem, 64 by default.
    blocks: in each stage.
    """
    return ResNet(classes, channels=channels, width=width, blocks=blocks)
