"""Recognise a training run that has collapsed."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """What an epoch showed. Accuracies from 0 to 1."""

    loss: float  # mean training loss
    train: float  # accuracy on the training batches, as attacked by the method
    robust: float  # accuracy under PGD on held-out images
    best: float  # the best `robust` so far
    chance: float = 0.1  # what a network that always gives the same answer has
    clean: float = 1.0  # accuracy on held-out images
    cleanest: float = -1.0  # the best `clean` so far
    classes: int = 10


def learnt(clean: float, chance: float, images: int) -> bool:
    """Whether accuracy on so many images is clearly above that of one answer for all of them.

    A network without that withstands every attack, and nothing follows from it.
    """
    clearly = chance + 2 * math.sqrt(chance * (1 - chance) / images)
    return clean > min(clearly, 1 - 1 / images)  # of a few images all must be right


def nothing_learnt(clean: float, chance: float) -> str:
    """What to say of such a network."""
    return (
        f"clean accuracy, {clean:.1%}, is not clearly above the {chance:.1%} of one answer for all "
        "images, so what withstands attacks means nothing"
    )


def collapse(health: Health) -> str | None:
    """Why the run has collapsed, or None.

    Catastrophic overfitting: the method's own attack is withstood while PGD is no longer. A network
    that has not learnt anything yet withstands every attack on the images of one class, and so does
    one that has unlearnt everything.
    """
    if not math.isfinite(health.loss):
        return f"the loss is {health.loss}"
    knows_nothing = health.clean <= health.chance + 0.05
    if knows_nothing and health.loss > 4 * math.log(max(health.classes, 2)):
        return (  # in a first epoch too, so that no later collapse goes back to it
            f"training diverged: the loss is {health.loss:.3g}, and clean accuracy "
            f"{health.clean:.1%}, what one answer for all images has"
        )
    if knows_nothing and health.cleanest >= health.chance + 0.25:
        return (
            f"all was unlearnt: clean accuracy fell from {health.cleanest:.1%} to "
            f"{health.clean:.1%}, what one answer for all images has"
        )
    lost = health.best >= health.chance + 0.05 and health.robust < 0.5 * health.best
    if lost and health.train - health.robust > 0.25:
        return (
            f"catastrophic overfitting: accuracy under PGD fell from {health.best:.1%} to "
            f"{health.robust:.1%} while the training attack is withstood at {health.train:.1%}"
        )
    return None
