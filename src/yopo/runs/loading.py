"""A trained network in one line, `yopo.load`, and its answer to a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they are loaded when a run is: `import yopo` does without
    from torch import nn

Answer = list[tuple[str, float]]  # names of classes and the network's confidence, highest first


def load(
    run: str | Path,
    weights: str | None = None,
    *,
    device: str = "cpu",
    trust: bool = False,
    model_name: str | None = None,
) -> "nn.Module":
    """The network of a run folder or a weights file: images in [0, 1] to logits, in eval mode.

    It has its weights, its options and its normalisation. `class_names` are the names of its
    outputs, `image_shape` (C, H, W) is what it was trained on. weights: "best" (default) or "last",
    of a run folder. device: where the network is. A network that is none of ours or timm's is built
    only with `trust`, or where `model_name` names it, as `yopo eval` has it: it is code.
    "hf:ORG/NAME", or "hf:ORG/NAME@REVISION", is a run that `yopo push` published on the Hugging
    Face Hub.
    """
    from yopo.runs.distributed import pick_device
    from yopo.runs.folder import WEIGHTS
    from yopo.runs.hub import local
    from yopo.runs.saved import find, load_images, load_model

    if weights not in (None, *WEIGHTS):
        raise ValueError(f"expected weights to be {' or '.join(WEIGHTS)}, got {weights!r}")
    saved = find(local(run), weights, trust=trust, model_name=model_name)
    images = load_images(saved)
    net = load_model(saved, images).to(pick_device(device))
    net.class_names = images.names  # type: ignore[assignment]
    net.image_shape = images.pictures.shape  # type: ignore[assignment]
    return net


def classify(net: "nn.Module", picture: Path, top: int = 3) -> Answer:
    """What a network from `load` sees on a picture, prepared as pictures of a folder are.

    Its shorter side is brought to the side of the network's images, and the centre is cut out.
    """
    import torch

    from yopo.data.formats import read_picture

    names, shape = net.class_names, net.image_shape
    assert isinstance(names, tuple)
    assert isinstance(shape, tuple)
    channels, height, width = shape
    if channels not in (1, 3):
        raise ValueError(f"pictures are grey or of three colours, the network's images {shape}")
    square = height == width
    pixels = read_picture(picture, height if square else None, "RGB" if channels == 3 else "L")
    if pixels.shape[:2] != (height, width):
        raise ValueError(
            f"expected a picture of {width}x{height} pixels, as the network was trained on, got "
            f"{pixels.shape[1]}x{pixels.shape[0]} in {picture}; cut it first"
        )
    x = torch.from_numpy(pixels.copy()).view(height, width, channels).permute(2, 0, 1)[None]
    parameter = next(net.parameters())
    with torch.no_grad():
        confidence = net(x.to(parameter) / 255)[0].softmax(0)
    if not confidence.isfinite().all():
        raise ValueError(
            f"the network's answer to {picture} is not finite: its weights are broken; take the "
            "others of the run (--weights last or best), or train it again"
        )
    order = confidence.argsort(descending=True)[:top].tolist()
    return [(str(names[i]), float(confidence[i])) for i in order]
