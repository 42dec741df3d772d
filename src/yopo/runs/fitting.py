"""What few images need: a smaller batch, more epochs, and words about what does not fit."""

import math
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from yopo.core.threat import Linf
from yopo.data.sources import Arrays
from yopo.runs.build import build_threat
from yopo.runs.idle import said_of_idle
from yopo.runs.images import DataSet, to_train_on
from yopo.runs.overlay import overlay
from yopo.runs.settings import Config, rescaled, validate

SMALLEST = 8  # images of a batch
STEPS_AN_EPOCH, STEPS, EPOCHS = 16, 600, 200  # as many as that, unless there would be more epochs
VISIBLE = 0.1  # an eps from which on photographs are no longer what they were
# What torch and timm say of a shape that does not go through a layer.
MISFIT = re.compile(
    r"shapes cannot be multiplied|to have \d+ channels|size mismatch|[Ss]izes? of tensors? "
    r"|is invalid for input of size|Kernel size can't be greater|Output size is too small"
    r"|normalized_shape|Expected .*D .*input|doesn't match model"
)


def fitted(config: Config, data: DataSet) -> Config:
    """With the batch and the epochs that the images need, as far as `fit` lets these change.

    Where the pictures of a folder are is settled too: it decides which of them are the test set.
    """
    if config.data.name == "folder" and config.data.resident is None:
        there = config.data.model_copy(update={"resident": isinstance(data, Arrays)})
        config = config.model_copy(update={"data": there})
    if not config.fit:
        return config
    if (n := to_train_on(data, config)) is None:
        return config.model_copy(update={"fit": []})
    batch = config.batch
    if "batch" in config.fit:
        most = min(batch, max(SMALLEST, n // STEPS_AN_EPOCH), n)
        batch = min(range(most // 2 + 1, most + 1), key=lambda b: (n % b, -b))  # the fewest left
    epochs = config.epochs
    if "epochs" in config.fit and n >= batch:
        epochs = max(epochs, min(EPOCHS, math.ceil(STEPS / (n // batch))))
    tree = rescaled(config.tree(), epochs)
    return validate(overlay(tree, {"batch": batch, "fit": []}))


def shared_out(config: Config, data: DataSet, world: int) -> int:
    """The batch that so many processes can share: the nearest, of two as near the smaller."""
    less = config.batch // world * world
    more, images = less + world, to_train_on(data, config)
    too_many = images is not None and more > images
    return less if less and (too_many or config.batch - less <= more - config.batch) else more


@contextmanager
def misfits_in_a_sentence(config: Config, shape: tuple[int, ...]) -> Iterator[None]:
    """Say of a network that does not take the images which shapes do not go together."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        first = str(error).partition("\n")[0]
        if not MISFIT.search(first):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if _is_a_users(Path(f.filename))]
        where = f" (line {theirs[-1].lineno} of {theirs[-1].filename})" if theirs else ""
        sized = config.data.name == "folder" and "channels" not in first
        size = "or bring pictures to the size it is for with --data.size, " if sized else ""
        raise ValueError(
            f"the network {config.model.name} does not take images of shape {shape}: {first}"
            f"{where}; see its --model.options, {size}or --model.name fitted, which takes any"
        ) from None


def _is_a_users(file: Path) -> bool:
    """Whether a line of code is neither ours, nor torch's, nor Python's own."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[1])
    python, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    own = file.is_relative_to(python) and not file.is_relative_to(packages)
    return file.is_file() and not own and not any(file.is_relative_to(folder) for folder in ours)


def said_of(config: Config, data: DataSet) -> list[str]:
    """What a user should know of these images, with these settings, before training."""
    lines = [*data.notes, *said_of_idle(config)]
    n = to_train_on(data, config) or 0
    if (left := n % config.batch) > 0.01 * n and left < n:
        lines.append(
            f"each epoch takes {n - left} of the {n} training images in batches of {config.batch}; "
            f"the {left} left over are others each time"
        )
    threat = build_threat(config.threat)
    if isinstance(threat, Linf) and threat.eps > VISIBLE and data.pictures.shape[0] == 3:
        lines.append(
            f"eps = {threat.eps:.3g} may move each colour by {round(255 * threat.eps)} of 255, "
            "which makes a photograph another picture; for photographs --threat.eps 8/255 is usual"
        )
    return lines
