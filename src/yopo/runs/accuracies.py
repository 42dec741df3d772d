"""What was measured of a network on disk: by evaluations beside it, else by its own training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yopo.core import files
from yopo.evaluation.card import attacked
from yopo.runs.folder import (
    RESULT,
    WEIGHTS,
    EvaluationFiles,
    evaluations_in,
    read_evaluation,
    read_result,
)
from yopo.runs.saved import Saved


@dataclass(frozen=True, slots=True)
class Accuracies:
    """Accuracies on test images, and where they stand."""

    file: str
    accuracy: dict[str, float]  # by attack; `worst` is what no attack broke
    images: int
    evaluation: dict[str, Any] | None  # all of it; none where the training itself measured


def evaluations(run: Path, saved: Saved) -> list[tuple[Path, dict[str, Any]]]:
    """The evaluations of just these weights, the newest first; one that is damaged is refused."""
    values = EvaluationFiles.of(run).values
    there = evaluations_in(run) if run.is_dir() else [values] * values.exists()
    digest = files.file_digest(saved.weights)
    read = ((path, read_evaluation(path)) for path in there)
    return [(path, values) for path, values in read if values["about"].get("file_sha256") == digest]


def accuracies(run: Path, saved: Saved) -> Accuracies | None:
    """What the newest evaluation found; where there is none, what the run did at its end.

    One with attacks goes before one without, which has no worst case.
    """
    newest = evaluations(run, saved)
    for path, values in sorted(newest, key=lambda one: not attacked(one[1]["attacks"])):
        shares = {name: attack["accuracy"] for name, attack in values["attacks"].items()}
        if attacked(values["attacks"]):
            shares["worst"] = values["worst"]["accuracy"]
        return Accuracies(path.name, shares, values["about"]["images"], values)
    which = next((w for w, file in WEIGHTS.items() if file == saved.weights.name), "")
    if run.is_dir() and (run / RESULT).exists():
        result = read_result(run)
        if own := result.get(which):
            return Accuracies(RESULT, own, result["test_images"], None)
    return None
