"""A network that no run of ours made, as `evaluate_run` takes it: its settings and its weights."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yopo.core import tensor_files
from yopo.core.names import AROUND
from yopo.core.tensor_files import Tensors
from yopo.data.prepared import Preparation, pictures_to_test_on
from yopo.runs.overlay import Tree, overlay
from yopo.runs.saved import Saved
from yopo.runs.settings import Config, validate

SECTIONS = ("model", "data", "threat")
# Where training scripts put the weights among other things; timm, too, takes averaged ones first.
KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "module", "net")
DEPTH = 4  # of them inside each other
CROP = 0.875  # torchvision's 224 of 256


def borrow(weights: Path, settings: Tree) -> Saved:
    """The network of that name and options, with the weights in a file that the user names.

    A file of torch.save is read for its tensors alone. What timm knows of a network's pictures
    (size, crop, mean and deviation) is taken where the settings do not say it.
    """
    if other := [name for name in settings if name not in SECTIONS]:
        raise ValueError(
            f"expected settings of {', '.join(SECTIONS)} for a network that is only evaluated, got "
            f"{', '.join(other)}; leave it out"
        )
    if not weights.is_file():
        raise ValueError(f"no file {weights}; give the network's weights with --weights FILE")
    config = validate(overlay(known_to_timm(settings), settings))
    state, entry = unwrapped(tensor_files.load_foreign(weights))
    if config.model.name == "preactresnet18" and any(".shortcut.0." in name for name in state):
        raise ValueError(
            f"{weights} has shortcut.0, as RobustBench's PreActResNet and locuslab's: by default "
            "their shortcuts see x, those of preactresnet18 relu(bn(x)), so renamed weights would "
            "load and answer otherwise; give their network, as --model.name my_module:build_model"
        )
    return Saved(config, weights, trusted=True, state=state, entry=entry, data=_pictures(config))


def unwrapped(content: Mapping[str, Any]) -> tuple[Tensors, str]:
    """The tensors by name, without wrappers' prefixes, and which entry of the file they were in."""
    entry = ""
    for _ in range(DEPTH):
        name = next((e for e in KEYS if isinstance(content.get(e), Mapping)), None)
        if name is not None:
            content, entry = content[name], f"{entry}.{name}" if entry else name
    state: Tensors = {k: v for k, v in content.items() if isinstance(k, str) and _is_plain(v)}
    if not state or len(state) < len(content):
        odd = next((k for k in content if not isinstance(k, str) or k not in state), None)
        what = "nothing" if odd is None and not content else f"a name of type {type(odd).__name__}"
        if isinstance(odd, str):
            what = f"something else as {odd[:60]!r}"
        raise ValueError(
            f"expected a network's tensors in the weights file, dense and by name, got {what}"
        )
    while len(first := {name.partition(".")[0] for name in state}) == 1 and first <= {*AROUND}:
        state = {name.partition(".")[2]: tensor for name, tensor in state.items()}
    return state, entry


def _is_plain(value: object) -> bool:
    """Whether it is numbers in memory, one after the other, and no other kind of tensor."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
    )


def known_to_timm(settings: Tree) -> Tree:
    """What timm's own description of a network says of its pictures."""
    model, data = settings.get("model", {}), settings.get("data", {})
    name = str(model.get("name", ""))
    if not name.startswith("timm:"):
        return {}
    try:
        timm = importlib.import_module("timm")
        cfg = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    except Exception:  # building the network says what is wrong with it
        return {}
    if cfg is None:
        return {}
    tree: Tree = {"model": {"normalize": [*cfg.mean, *cfg.std]}}
    if data.get("name") == "folder":
        if cfg.crop_mode not in (None, "center"):
            raise ValueError(
                f"{name} wants its pictures cut as {cfg.crop_mode!r}, which yopo does not; give "
                "them ready, as --data.name npz"
            )
        size = int(data.get("size", (cfg.test_input_size or cfg.input_size)[-1]))
        crop = cfg.test_crop_pct or cfg.crop_pct or CROP
        tree["data"] = {"size": size, "resize": math.floor(size / crop)}
        tree["data"]["interpolation"] = cfg.interpolation or "bilinear"
    return tree


def _pictures(config: Config) -> Any:  # noqa: ANN401
    """The test pictures of a folder; other data are read as a run's are."""
    data = config.data
    if data.name != "folder":
        return None
    if data.root is None:
        raise ValueError("expected the folder with the pictures: --data.root DIR")
    size = data.size or 224
    how = Preparation(data.resize or math.floor(size / CROP), size, data.interpolation)
    return pictures_to_test_on(data.root, how)
