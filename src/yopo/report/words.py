"""What is said of one run in sentences: notes to read first, and which weights were evaluated."""

from typing import Any

from yopo.report.records import Run
from yopo.runs.folder import METRICS
from yopo.runs.guard import learnt, nothing_learnt


def notes(run: Run) -> list[str]:
    """What a reader must know before believing the curves."""
    told = []
    if run.torn:
        told.append(f"The last line of {METRICS} is cut off and was left out.")
    if not run.lines:
        told.append("No epoch is finished yet.")
    elif run.result is None:
        told.append(
            f"Not finished: {run.lines[-1]['epoch']} of {run.config['epochs']} epochs, "
            "and no result on the test set."
        )
    elif run.shared:
        told.append("Shared a GPU with other runs; time does not count.")
    told += [
        f"{file} is of other weights than the run has now; evaluate these."
        for file, evaluation in run.evaluations.items()
        if not run.weights(evaluation)
    ]
    if poor := unlearnt(run):
        told.append(f"{poor[0].upper()}{poor[1:]}.")
    told += [
        f"Collapse in epoch {line['epoch']}: {line['collapse']} ({line['action']})."
        for line in run.lines
        if "collapse" in line
    ]
    return told


def unlearnt(run: Run) -> str | None:
    """What to say if its own weights do no better than one answer for all images."""
    result, (_, own) = run.result or {}, run.own
    if "chance" not in result or learnt(own["clean"], result["chance"], result["test_images"]):
        return None
    return nothing_learnt(own["clean"], result["chance"])


def evaluated_weights(run: Run, evaluation: dict[str, Any]) -> str:
    """Which of the run's weights an evaluation is of: best = last where they are the same."""
    return " = ".join(sorted(run.weights(evaluation))) or "replaced"
