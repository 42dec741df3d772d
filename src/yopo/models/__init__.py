"""Networks with the paper's shapes, and the normalisation that belongs inside a model.

All take images in [0, 1] and answer logits. `stem` is the first convolution of each, where f0
ends unless told otherwise.
"""

from yopo.models.normalize import Normalize
from yopo.models.resnet import PreActResNet, fitted, preactresnet18, wideresnet
from yopo.models.resnet50 import resnet50
from yopo.models.smallcnn import SmallCNN

__all__ = [
    "Normalize",
    "PreActResNet",
    "SmallCNN",
    "fitted",
    "preactresnet18",
    "resnet50",
    "wideresnet",
]
