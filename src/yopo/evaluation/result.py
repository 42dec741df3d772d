"""What an evaluation found, with intervals."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from yopo.evaluation.card import card
from yopo.evaluation.suite import Outcome
from yopo.evaluation.warnings import Suspicion

Interval = tuple[float, float]


def wilson(right: int, n: int) -> Interval:
    """Wilson's 95% interval for a share of `right` in n."""
    p, z = right / n, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    low = 0.0 if right == 0 else centre - half  # exact there, but for rounding
    return low, 1.0 if right == n else centre + half


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """Accuracy of each attack by itself, and of all of them together.

    An attack's accuracy is its own: it starts from the images that are classified correctly and
    knows nothing of what the other attacks broke. `worst` counts an image only if no attack broke
    it.
    """

    outcomes: dict[str, Outcome]  # by attack: which images withstood it, and what it cost
    about: dict[str, Any]  # what was evaluated, with what, where
    warnings: Sequence[Suspicion] = ()  # reasons to doubt the numbers
    forget: Callable[[], None] = field(default=lambda: None)  # removes what `state=` kept on disk

    @property
    def accuracy(self) -> dict[str, float]:
        """By attack; `clean` is always there."""
        return {name: outcome.accuracy for name, outcome in self.outcomes.items()}

    @property
    def interval(self) -> dict[str, Interval]:
        """95% interval of each accuracy, over the draw of the images."""
        return {name: _interval(o.correct) for name, o in self.outcomes.items()}

    @property
    def correct(self) -> dict[str, Tensor]:
        """By attack, which images (N,) it left classified correctly."""
        return {name: outcome.correct for name, outcome in self.outcomes.items()}

    @property
    def standing(self) -> Tensor:
        """Images (N,) that no attack broke."""
        return torch.stack([o.correct for o in self.outcomes.values()]).all(0)

    @property
    def worst(self) -> float:
        """Share of images that no attack broke."""
        return float(self.standing.double().mean())

    @property
    def worst_interval(self) -> Interval:
        """95% interval of `worst`."""
        return _interval(self.standing)

    @property
    def propagations(self) -> dict[str, float]:
        """What each attack cost: full propagations for each image of the data set."""
        n = len(self.standing)
        return {name: outcome.cost / n for name, outcome in self.outcomes.items()}

    def __repr__(self) -> str:
        shares = [f"{name} {100 * share:.2f}%" for name, share in self.accuracy.items()]
        codes = f", warnings: {', '.join(w.code for w in self.warnings)}" if self.warnings else ""
        return f"Result({', '.join(shares)}, worst {100 * self.worst:.2f}%{codes})"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the images, as plain values."""
        attacks = {
            name: {
                "accuracy": outcome.accuracy,
                "interval": list(self.interval[name]),
                "settings": self.about["settings"].get(name, ""),
                "seconds": outcome.seconds,
                "propagations": self.propagations[name],
                **({"after": _shares(outcome)} if outcome.after else {}),
            }
            for name, outcome in self.outcomes.items()
        }
        return {
            "accuracy": self.accuracy,
            "worst": {"accuracy": self.worst, "interval": list(self.worst_interval)},
            "attacks": attacks,
            "warnings": [{"code": w.code, "text": w.text} for w in self.warnings],
            "about": {k: v for k, v in self.about.items() if k != "settings"},
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def card(self) -> str:
        """The evaluation on half a page of Markdown, for a paper or a model's page."""
        return card(self.to_dict())


def _shares(outcome: Outcome) -> dict[str, float]:
    return {stage: float(correct.double().mean()) for stage, correct in outcome.after.items()}


def _interval(correct: Tensor) -> Interval:
    return wilson(int(correct.sum()), len(correct))
