"""Pre-activation residual networks: PreAct-ResNet18 and WideResNet are two settings of one."""

from collections.abc import Sequence

from torch import Tensor, nn

from yopo.models.stem import Stem


class PreActBlock(nn.Module):
    """x + conv(relu(bn(conv(relu(bn(x)))))), with a 1x1 convolution where the shape changes.

    That convolution sees relu(bn(x)), as in the paper's released code. In RobustBench's default
    block and in locuslab's it sees x: their weights have the same shapes, fit after
    `shortcut.0` is renamed `shortcut`, and give other outputs.
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = (
            None
            if stride == 1 and channels == out
            else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, out, H/stride, W/stride)
        """Apply the block."""
        out = self.bn1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(self.bn2(self.conv1(out)).relu())
        return out + shortcut  # type: ignore[no-any-return]


class PreActResNet(nn.Module):
    """conv1, then stages layer1, layer2, … of blocks, a global average and a linear layer.

    stem: filters of conv1. widths, blocks: filters and blocks of each stage; every stage but the
    first halves the resolution. channels: of the images. classes: to tell apart. final_bn:
    BatchNorm and ReLU before the average; without it, as in the released YOPO code, large learning
    rates diverge.
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        channels: int = 3,
        stem: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        final_bn: bool = True,
    ) -> None:
        super().__init__()
        if len(widths) != len(blocks):
            raise ValueError(f"expected as many widths as blocks, got {widths} and {blocks}")
        self.conv1 = Stem(channels, stem, padding=1, bias=False)
        self.stages = len(widths)
        before = stem
        for i, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
            layers = []
            for j in range(count):
                stride = 2 if i > 1 and j == 0 else 1
                layers.append(PreActBlock(before, width, stride))
                before = width
            self.add_module(f"layer{i}", nn.Sequential(*layers))
        self.bn = nn.BatchNorm2d(before) if final_bn else None
        self.linear = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, classes)
        """Logits of x."""
        return self.rest(self.conv1(x))

    def rest(self, out: Tensor) -> Tensor:  # (B, stem, H, W) -> (B, classes)
        """g: all that follows conv1."""
        for i in range(1, self.stages + 1):
            out = self.get_submodule(f"layer{i}")(out)
        if self.bn is not None:
            out = self.bn(out).relu()
        return self.linear(out.mean((2, 3)))  # type: ignore[no-any-return]


def preactresnet18(
    classes: int = 10,
    *,
    channels: int = 3,
    width: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    final_bn: bool = True,
) -> PreActResNet:
    """PreAct-ResNet18; `width` filters in the first stage, doubled in each further one.

    classes, channels, final_bn: as for `PreActResNet`. blocks: in each stage.
    Weights of RobustBench's default network, or of locuslab's, fit once `shortcut.0` is renamed
    `shortcut`, and give other answers: their shortcuts see x, these relu(bn(x)), as the paper's do.
    Compare clean accuracy before you attack what you loaded.
    """
    widths = [width * 2**i for i in range(len(blocks))]
    return PreActResNet(
        classes, channels=channels, stem=width, widths=widths, blocks=blocks, final_bn=final_bn
    )


def wideresnet(
    classes: int = 10, *, channels: int = 3, depth: int = 34, width: int = 10
) -> PreActResNet:
    """WRN-depth-width, by default WRN-34-10; `channels` of the images, `classes` to tell apart."""
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"expected depth = 6k + 4 (10, 16, 22, 28, 34, …), got {depth}")
    net = PreActResNet(
        classes,
        channels=channels,
        stem=16,
        widths=[16 * width, 32 * width, 64 * width],
        blocks=[(depth - 4) // 6] * 3,
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(net.linear.bias)
    return net


def fitted(
    classes: int = 10, *, channels: int = 3, size: int = 64, width: int = 128
) -> PreActResNet:
    """A residual network for images of any `size`, small enough for a few hundred of them.

    Its stages halve the image until it is at most 8x8 (six at most); the last has `width` filters,
    each before it half as many, but at least 16. Where a stage sees more than 32x32, it is one
    block, else two. classes, channels: as for `PreActResNet`.
    """
    if size < 1 or width < 1:
        raise ValueError(f"expected size and width of at least 1, got {size} and {width}")
    sides = [size]
    while sides[-1] > 8 and len(sides) < 6:
        sides.append(-(-sides[-1] // 2))
    last = len(sides) - 1
    widths = [max(min(16, width), width // 2 ** (last - i)) for i in range(len(sides))]
    blocks = [1 if side > 32 else 2 for side in sides]
    return PreActResNet(classes, channels=channels, stem=widths[0], widths=widths, blocks=blocks)
