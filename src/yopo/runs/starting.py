"""The weights that training begins with, where they are not drawn: timm's own, or those of a file.

They count when training begins and never later: a run has its own weights, and who builds its
network needs neither the file nor timm's.
"""

import importlib
from pathlib import Path

from torch import nn

from yopo.core import tensor_files
from yopo.core.tensor_files import Tensors
from yopo.runs.borrowed import known_to_timm, unwrapped
from yopo.runs.build import IMAGENET
from yopo.runs.images import DataSet
from yopo.runs.saved import completed, differences
from yopo.runs.sections import ModelConfig

TIMM = "timm"


def begin_with(model: nn.Module, config: ModelConfig, data: DataSet) -> str:
    """Let the network have them; say whose they are, and what begins anew."""
    own, classes = model.state_dict(), len(data.names)
    given = _timms(config, data) if config.start == TIMM else _of_file(Path(str(config.start)))
    if "normalize.mean" in given and "normalize.mean" not in own:
        raise ValueError(
            f"{config.start} has a normalisation, and this network none, so it would see other "
            "pixels than before; say --model.normalize true"
        )
    state = completed(given, own)
    head = [name for name in own if name in state and _is_of_classes(own, state, name, classes)]
    state |= {name: own[name] for name in head}
    if wrong := differences(own, state):
        raise ValueError(
            f"{config.start} is of another architecture than {config.name}: {wrong}; give the "
            "network's own weights to --model.start, or none: --model.start ''"
        )
    model.load_state_dict(state)
    text = f"training begins with the weights of {config.start}"
    if head:
        inside = "net." if "normalize.mean" in own else ""
        modules = dict.fromkeys(n.removeprefix(inside).rpartition(".")[0] for n in head)
        text += f", and a new {' and '.join(modules)} for {classes} classes"
    return text + _other_pixels(config)


def _is_of_classes(own: Tensors, state: Tensors, name: str, classes: int) -> bool:
    """Whether a tensor has a row for each class, and there for each of other classes."""
    mine, theirs = own[name].shape, state[name].shape
    return mine != theirs and mine[:1] == (classes,) and mine[1:] == theirs[1:]


def _of_file(path: Path) -> Tensors:
    if not path.is_file():
        raise ValueError(
            f"no file {path} to begin with; give --model.start a safetensors file, or timm"
        )
    return unwrapped(tensor_files.load_weights(path))[0]


def _timms(config: ModelConfig, data: DataSet) -> Tensors:
    """What timm has for the network, its head included."""
    prefix, _, name = config.name.partition(":")
    if prefix != TIMM:
        raise ValueError(
            f"model.start timm is for networks of timm's, as --model.name timm:resnet50, and this "
            f"is {config.name}; give --model.start a safetensors file, or nothing: ''"
        )
    options = {"in_chans": data.pictures.shape[0], **config.options}
    options.pop("num_classes", None)
    try:
        timm = importlib.import_module("timm")
        if not timm.is_model_pretrained(name):
            raise ValueError("it has none")
        net: nn.Module = timm.create_model(name, pretrained=True, **options)
    except Exception as error:  # of the network, of the Hub, or timm's own
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"timm gave no weights for {name}: {why}; get them where there is a network, or give "
            "a safetensors file to --model.start"
        ) from None
    return dict(net.state_dict())


def _other_pixels(config: ModelConfig) -> str:
    """What to say where the network normalises otherwise than timm's weights are used to."""
    wanted = known_to_timm({"model": {"name": config.name}}).get("model", {}).get("normalize")
    given = IMAGENET if config.normalize == "imagenet" else config.normalize
    if wanted is None or config.start != TIMM or given == [float(number) for number in wanted]:
        return ""
    return f"; these are used to --model.normalize {','.join(map(str, wanted))}"
