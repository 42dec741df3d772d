"""What a file names, and not the user: networks, ours and timm's alone, and data sets of ours."""

import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from yopo.data import Sources
from yopo.data.listing import look_into
from yopo.runs.build import NETWORKS, build_data, build_model, build_network
from yopo.runs.images import DataSet, workers
from yopo.runs.sections import DataConfig, ModelConfig

# timm's names of architectures, with the tag of their training; no hf-hub:, local-dir: or path.
ARCHITECTURE = re.compile(r"[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64})?")
# Arguments that timm hands to a network's own constructor and that say what is computed, with the
# most that a number may be: a single tensor stays small then. What timm itself takes (pretrained,
# checkpoint_path, cache_dir, ...) names files and addresses; what is not listed may do so too.
TIMM = {
    "num_classes": 100_000,
    "in_chans": 64,
    "img_size": 1024,
    "patch_size": 64,
    "window_size": 64,
    "output_stride": 64,
    "reg_tokens": 64,
    "init_values": 100,
    **dict.fromkeys(("drop_rate", "drop_path_rate", "drop_block_rate", "attn_drop_rate"), 1),
    **dict.fromkeys(("proj_drop_rate", "pos_drop_rate", "patch_drop_rate"), 1),
    **dict.fromkeys(("global_pool", "act_layer", "norm_layer", "class_token"), 1),
    **dict.fromkeys(("qkv_bias", "qk_norm", "fc_norm", "dynamic_img_size"), 1),
}
Shape = tuple[int, ...]
PIXELS = TIMM["img_size"] ** 2  # of an image
LARGEST = 1_000_000  # a number among the options of our own networks
LONGEST = 16  # numbers in a list


def check(config: ModelConfig) -> None:
    """Refuse a network that is neither ours nor timm's, and options that are no plain values."""
    if config.name in NETWORKS:
        limits = dict.fromkeys(config.options, LARGEST)
    elif (name := config.name.removeprefix("timm:")) != config.name:
        if not ARCHITECTURE.fullmatch(name):
            raise _refused(f"timm:{name}", "a file may name an architecture of timm's, no address")
        limits = TIMM
    else:
        raise _refused(config.name, "a file may name our networks and timm's, no code")
    for key, value in config.options.items():
        if key not in limits:
            raise _refused(
                f"{config.name} with option {key!r}", "no plain option of an architecture"
            )
        if not _plain(value, limits[key]):
            raise _refused(
                f"{config.name} with {key} = {repr(value)[:60]}",
                f"expected a number up to {limits[key]:,}, at most {LONGEST} of them, or a word",
            )


def bounded(config: DataConfig) -> DataConfig:
    """With no more processes than this machine would start by itself."""
    if config.workers is None:
        return config
    return config.model_copy(update={"workers": min(config.workers, workers(DataConfig()))})


def load_data(config: DataConfig) -> DataSet:
    """The data, if they are ours: for others a function would have to be called.

    How much of them is in memory is this machine's affair, but for the pictures of a folder that
    are not split: it decides which of them are the test set.
    """
    if ":" in config.name:
        raise ValueError(
            f"the run names its data {config.name}, which was not imported: a file may name our "
            "data sets, no code. If you trust it, say --trust"
        )
    _check_sides(config.size or 0, config.size or 0)
    data = build_data(config.model_copy(update={"resident": config.resident and None}))
    _check_sides(*data.pictures.shape[1:])
    _check_sides(*data.test.shape[1:])
    if config.resident and isinstance(data, Sources) and _is_drawn(config):
        raise ValueError(
            "the run drew its test set while all pictures were in memory (data.resident), for "
            "which they are too many here. If you trust it, say --trust"
        )
    return data


def _check_sides(height: int, width: int) -> None:
    if height * width > PIXELS:
        raise ValueError(
            f"the run's images have {height}x{width} pixels, and a file may ask for {PIXELS:,} at "
            "most. If you trust it, say --trust"
        )


def _is_drawn(config: DataConfig) -> bool:
    """Whether a folder has one set of pictures, of which some are drawn to test on."""
    return config.root is not None and look_into(config.root).test is None


def build(
    config: ModelConfig, x_train: Tensor, classes: int, held: Mapping[str, Shape]
) -> nn.Module:
    """The network for weights of the shapes `held`, if it is one that a file may name."""
    check(config)
    _, channels, _, side = x_train.shape
    try:
        if config.name not in NETWORKS:
            importlib.import_module("timm")  # outside: what it makes itself is to have memory
        # Without memory first: one tensor could take all there is.
        with _no_larger(held), torch.device("meta"):
            build_network(config, classes, channels, side)
        with _no_larger(held):
            return build_model(config, x_train, classes)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"the file's {config.name} cannot be built: {said}") from None


@contextmanager
def _no_larger(held: Mapping[str, Shape]) -> Iterator[None]:
    """Stop building at twice what the file has; a network may replace some of its parameters."""
    elements, made = sum(map(prod, held.values())), Counter[str]()

    def count(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        kind = "parameters" if isinstance(tensor, nn.Parameter) else "buffers"
        made.update({kind: tensor.numel(), "tensors": kind == "parameters"})
        if made[kind] > 2 * elements or made["tensors"] > 2 * len(held):
            raise ValueError(
                f"it has more {kind} than the weights file, which has "
                f"{elements:,} numbers in {len(held):,} tensors"
            )

    hooks = [
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain(value: object, most: float) -> bool:
    """Whether it is a bearable number, a few of them, a flag, nothing, or a word without a path."""
    if isinstance(value, list):
        return len(value) <= LONGEST and all(
            isinstance(v, int | float) and _plain(v, most) for v in value
        )
    if isinstance(value, str):
        return re.fullmatch("[A-Za-z0-9_]{0,32}", value) is not None
    return value is None or (isinstance(value, int | float) and abs(value) <= most)


def _refused(what: str, why: str) -> ValueError:
    return ValueError(
        f"the run or file names {what}, which was not built: {why}. If you trust it, say "
        "--trust, or for a module of your own name it yourself: --model.name my_module:build_model"
    )
