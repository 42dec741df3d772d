"""Networks with the paper's shapes, and the normalisation that belongs inside a model."""

from yopo.models.normalize import Normalize
from yopo.models.resnet import PreActResNet, preactresnet18, wideresnet
from yopo.models.smallcnn import SmallCNN

__all__ = ["Normalize", "PreActResNet", "SmallCNN", "preactresnet18", "wideresnet"]
