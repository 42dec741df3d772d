"""What few images need: a smaller batch, more epochs, and words about what does not fit."""

import math

from yopo.core.threat import Linf
from yopo.data.sources import Arrays
from yopo.runs.build import build_threat
from yopo.runs.images import held_out
from yopo.runs.overlay import overlay
from yopo.runs.settings import Config, rescaled, validate

SMALLEST = 8  # images of a batch
STEPS_AN_EPOCH, STEPS, EPOCHS = 16, 600, 200  # as many as that, unless there would be more epochs
VISIBLE = 0.1  # an eps from which on photographs are no longer what they were


def fitted(config: Config, data: Arrays) -> Config:
    """With the batch and the epochs that the images need, as far as `fit` lets these change."""
    if not config.fit:
        return config
    n = len(data.x_train) - held_out(len(data.x_train), config)
    batch = config.batch
    if "batch" in config.fit:
        most = min(batch, max(SMALLEST, n // STEPS_AN_EPOCH), n)
        batch = min(range(most // 2 + 1, most + 1), key=lambda b: (n % b, -b))  # the fewest left
    epochs = config.epochs
    if "epochs" in config.fit and n >= batch:
        epochs = max(epochs, min(EPOCHS, math.ceil(STEPS / (n // batch))))
    tree = rescaled(config.tree(), epochs)
    return validate(overlay(tree, {"batch": batch, "fit": []}))


def said_of(config: Config, data: Arrays) -> list[str]:
    """What a user should know of these images, with these settings, before training."""
    lines = list(data.notes)
    n = len(data.x_train) - held_out(len(data.x_train), config)
    if (left := n % config.batch) > 0.01 * n and left < n:
        lines.append(
            f"each epoch takes {n - left} of the {n} training images in batches of {config.batch}; "
            f"the {left} left over are others each time"
        )
    threat = build_threat(config.threat)
    if isinstance(threat, Linf) and threat.eps > VISIBLE and data.x_train.shape[1] == 3:
        lines.append(
            f"eps = {threat.eps:.3g} may move each colour by {round(255 * threat.eps)} of 255, "
            "which makes a photograph another picture; for photographs --threat.eps 8/255 is usual"
        )
    return lines
