"""From a Config to the objects it describes."""

import difflib
import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import yopo
from yopo.core.frozen import forked_rng
from yopo.data import Arrays, Sources, load
from yopo.data.pictures import read_or_list
from yopo.methods.registry import ENTRIES
from yopo.runs import own
from yopo.runs.sections import DataConfig, L2Config, LinfConfig, ModelConfig
from yopo.runs.settings import Config

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "smallcnn": yopo.models.SmallCNN,
    "preactresnet18": yopo.models.preactresnet18,
    "wideresnet": yopo.models.wideresnet,
    "resnet50": yopo.models.resnet50,
    "fitted": yopo.models.fitted,
}
IMAGENET = [0.485, 0.456, 0.406, 0.229, 0.224, 0.225]  # means, deviations of its pixels
SIZED = ("smallcnn", "fitted")  # they are built for images of one size


def build_data(config: DataConfig) -> Arrays | Sources:
    """The data set of a configuration."""
    c = config
    if ":" in c.name:
        return _own_data(c)
    if c.resize is not None:
        raise ValueError(
            "data.resize is for `yopo eval` of a network of someone else's; leave it out"
        )
    if c.options:
        raise ValueError(
            f"data.options are arguments of a build_data of your own, and {c.name} has none; "
            f"leave out {', '.join(f'--data.options.{name}' for name in c.options)}"
        )
    if c.name == "folder" and c.root is not None and c.path is None:
        return read_or_list(
            c.root, c.size, skip_broken=c.skip_broken, resident=c.resident, area=c.area
        )
    if c.area < 1:
        raise ValueError(f"data.area is for folders of pictures; leave it out with {c.name}")
    return load(c.name, root=c.root, path=c.path, size=c.size, skip_broken=c.skip_broken)


def _own_data(c: DataConfig) -> Arrays | Sources:
    """Call the user's function; root, path and size are arguments of it as any other."""
    build = own.find("data.name", c.name, "yopo.data.Sources")
    given = {name: getattr(c, name) for name in ("root", "path", "size")}
    options = c.options | {name: value for name, value in given.items() if value is not None}
    if c.skip_broken:
        options["skip_broken"] = True
    if c.area < 1:
        raise ValueError(f"data.area is for folders of pictures; leave {c.name} to cut its own")
    own.check_fits("data.options", c.name, build, **options)
    data = build(**options)
    if not isinstance(data, Arrays | Sources):
        raise ValueError(
            f"expected {c.name} to return yopo.data.Sources, or yopo.data.Arrays, got "
            f"{type(data).__name__}"
        )
    return data


def build_threat(config: LinfConfig | L2Config, part: float = 1.0) -> yopo.Linf | yopo.L2:
    """The threat of a configuration, or the same shrunk to a part of its size."""
    kind = yopo.Linf if config.name == "linf" else yopo.L2
    return kind(part * config.eps, None if config.step is None else part * config.step)


def build_method(config: Config, model: nn.Module, optimizer: Optimizer) -> yopo.Method:
    """The training method of a configuration."""
    threat = build_threat(config.threat, config.train_eps)
    loss = partial(F.cross_entropy, label_smoothing=config.label_smoothing)
    entry, settings = ENTRIES[config.method.name], config.method.model_dump(exclude={"name"})
    if config.schedule.m and "m" not in entry.parameters:
        raise ValueError(
            f"schedule.m is for methods with propagations m, and {entry.name} has none; leave it "
            "out: --schedule.m []"
        )
    return entry.build(model, settings, threat=threat, optimizer=optimizer, loss=loss)


def out_of_reach(config: Config) -> str | None:
    """What to say of an adversary whose steps add up to less than eps, or to none."""
    entry, settings = ENTRIES[config.method.name], config.method.model_dump()
    threat = build_threat(config.threat)
    each = [config.method, *(with_m(config, m).method for m in config.schedule.m)]
    steps = min(entry.steps(method.model_dump()) for method in each)
    if none := [name for name in entry.eta_steps if settings[name] == 0]:
        return f"{none[0]} = 0: the adversary takes no steps, so this trains on random noise"
    if steps == 0 or steps * threat.step > 0.99 * threat.eps:
        return None
    return (
        f"{steps} steps of {threat.step:.3g} add up to {steps * threat.step:.3g}, less than eps = "
        f"{threat.eps:.3g}: from the ball's centre this adversary cannot reach its surface; "
        f"--threat.step {threat.eps / steps:.3g} or more could"
    )


def with_m(config: Config, m: int | None) -> Config:
    """The same with another number of propagations, if one is given."""
    if m is None:
        return config
    return config.model_copy(update={"method": config.method.model_copy(update={"m": m})})


def propagations(config: Config) -> float:
    """What the method pays for a batch, counted on a small network; it is the same on any."""
    free = {"first_layer": None, "layers": None}  # names of the user's modules
    own = {k: v for k, v in free.items() if k in type(config.method).model_fields}
    config = config.model_copy(update={"method": config.method.model_copy(update=own)})
    x = torch.full((2, 1, 2, 2), 0.5)
    with forked_rng(x):
        net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
        method = build_method(config, net, torch.optim.SGD(net.parameters(), lr=0.0))
        return method.backward(x, torch.tensor([0, 1])).propagations


def build_model(config: ModelConfig, x_train: Tensor, classes: int) -> nn.Module:
    """The network for images like x_train (N, C, H, W), uint8."""
    _, channels, height, width = x_train.shape
    if config.name == "smallcnn" and height != width and "size" not in config.options:
        raise ValueError(
            f"smallcnn is for square images, got {height}x{width}; "
            "give --data.size 64 for folders of pictures, or --model.name fitted"
        )
    net = build_network(config, classes, channels, min(height, width))
    if config.normalize is False:
        return net
    if config.normalize is True:
        pixels = x_train[:: max(1, len(x_train) // 10000)].float() / 255
        mean, std = pixels.mean((0, 2, 3)).tolist(), pixels.std((0, 2, 3)).clamp(min=1e-3).tolist()
    else:
        both = IMAGENET if config.normalize == "imagenet" else list(config.normalize)
        mean, std = both[: len(both) // 2], both[len(both) // 2 :]
        if len(mean) != channels:
            raise ValueError(
                f"expected model.normalize with {channels} means and {channels} deviations, for "
                f"images of {channels} channels, got {len(both)} numbers"
            )
    whole = nn.Sequential()
    whole.add_module("normalize", yopo.Normalize(mean, std))
    whole.add_module("net", net)
    return whole


def build_network(config: ModelConfig, classes: int, channels: int, side: int) -> nn.Module:
    """The network itself, without normalisation."""
    if config.name in NETWORKS:
        options = {"channels": channels, **config.options}
        if config.name in SIZED:
            options.setdefault("size", side)
        own.check_fits("model.options", config.name, NETWORKS[config.name], classes, **options)
        try:
            return NETWORKS[config.name](classes, **options)
        except TypeError as error:
            raise ValueError(f"model.options do not fit {config.name}: {error}") from None
    if config.name.startswith("timm:"):
        try:
            timm = importlib.import_module("timm")
        except Exception as error:
            raise ValueError(f"{config.name} needs timm, which does not import: {error}") from None
        options = {"num_classes": classes, "in_chans": channels, **config.options}
        name = config.name.removeprefix("timm:")
        try:
            net: nn.Module = timm.create_model(name, **options)
        except TypeError as error:
            raise ValueError(f"model.options do not fit {config.name}: {error}") from None
        except RuntimeError:
            if timm.is_model(name):
                raise
            near = difflib.get_close_matches(name, timm.list_models()) or timm.list_models()[:3]
            raise ValueError(f"no model {name!r} in timm; near names: {', '.join(near)}") from None
        return net
    if ":" not in config.name:
        raise ValueError(
            f"no model {config.name!r}; there are: {', '.join(NETWORKS)}, my_module:function "
            "for your own, timm:NAME for timm's"
        )
    return _own(config, classes)


def _own(config: ModelConfig, classes: int) -> nn.Module:
    """Call the user's function; it is told the number of classes if it asks for it."""
    build = own.find("model.name", config.name, "a torch.nn.Module")
    options = dict(config.options)
    if own.takes(build, "classes"):
        options.setdefault("classes", classes)
    own.check_fits("model.options", config.name, build, **options)
    net = build(**options)
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"expected {config.name} to return a torch.nn.Module, got {type(net).__name__}"
        )
    return net


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """SGD or AdamW; the rate is set anew at every step."""
    c, parameters = config.optimizer, [p for p in model.parameters() if p.requires_grad]
    if c.name == "adamw":
        if c.nesterov:
            raise ValueError("optimizer.nesterov is SGD's; leave it out with adamw")
        betas = (c.momentum, 0.999)
        return torch.optim.AdamW(parameters, lr=c.lr, betas=betas, weight_decay=c.weight_decay)
    if c.nesterov and c.momentum == 0:
        raise ValueError(
            "optimizer.nesterov looks ahead along the momentum; expected optimizer.momentum above "
            "0, got 0; leave it out, or say --optimizer.nesterov false"
        )
    return torch.optim.SGD(
        parameters,
        lr=c.lr,
        momentum=c.momentum,
        nesterov=c.nesterov,
        weight_decay=c.weight_decay,
    )
