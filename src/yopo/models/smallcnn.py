"""The paper's MNIST network: 4 convolutions and 3 linear layers (from TRADES)."""

from collections import OrderedDict

from torch import nn

from yopo.models.stem import Stem


class SmallCNN(nn.Sequential):
    """For (B, channels, size, size); `width` filters, then twice as many, `hidden` linear units.

    classes: to tell apart. dropout: its rate, before the second linear layer.
    f0 is conv1 with first_layer="conv1" (the default split; affine) and conv1+ReLU with "relu1",
    as in the paper's MNIST runs.
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        channels: int = 1,
        size: int = 28,
        width: int = 32,
        hidden: int = 200,
        dropout: float = 0.5,
    ) -> None:
        side = ((size - 4) // 2 - 4) // 2  # two unpadded 3x3 convolutions and a pool, twice
        if side < 1:
            raise ValueError(f"expected images of at least 16x16, got size={size}")
        layers = OrderedDict[str, nn.Module](
            conv1=Stem(channels, width),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(width, width, 3),
            relu2=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv3=nn.Conv2d(width, 2 * width, 3),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(2 * width, 2 * width, 3),
            relu4=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(2 * width * side * side, hidden),
            relu5=nn.ReLU(),
            dropout=nn.Dropout(dropout),
            fc2=nn.Linear(hidden, hidden),
            relu6=nn.ReLU(),
            fc3=nn.Linear(hidden, classes),
        )
        super().__init__(layers)
