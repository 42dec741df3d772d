"""What training would take on a quiet machine, and where a machine was too busy to say."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median, quantiles

from yopo.evaluation.card import duration
from yopo.report.records import Run

# Both from the trainings in records/: epochs of those that had their machine for themselves spread
# by at most 0.21 of their median, and a propagation of one method takes up to 1.8 of another's.
SCATTER = 0.25  # the middle half of the epochs' times, in parts of the median
APART = 2.0  # a ratio of times, in parts of the ratio of propagations
SHARED = 1.25  # the processors that one run had, in parts of another's with as many threads


def epoch_seconds(run: Run, of: str = "train_seconds") -> list[float]:
    """What each epoch took, in the order they were trained."""
    marks = [0.0] + [s for line in run.lines if (s := line.get(of)) is not None]
    return [after - before for before, after in pairwise(marks) if after > before]


def median_epoch(run: Run) -> float | None:
    """What an undisturbed epoch takes: others' work lengthens some, the median stays."""
    return median(times) if (times := epoch_seconds(run)) else None


def busy(run: Run) -> str | None:
    """ "epochs took 8.8 s to 2.6 min", if they scatter so that their median says little."""
    times = epoch_seconds(run)
    if len(times) < 2:
        return None
    low, middle, high = quantiles(times, n=4, method="inclusive")
    if high - low <= SCATTER * middle:
        return None
    return f"epochs took {duration(min(times))} to {duration(max(times))}"


def processor_seconds(runs: Sequence[Run]) -> float | None:
    """As `undisturbed`, in processor time, which others' work hardly changes; None on a GPU."""
    if any("cpu" not in run.environment.get("hardware", "") for run in runs):
        return None
    each = [epoch_seconds(run, "processor_seconds") for run in runs]
    return mean(median(times) * len(times) for times in each) if all(each) else None


def undisturbed(runs: Sequence[Run]) -> float | None:
    """Seconds of a training of median epochs, mean over the runs that tell; None if none does."""
    each = [(median_epoch(run), len(epoch_seconds(run))) for run in runs if not busy(run)]
    known = [seconds * epochs for seconds, epochs in each if seconds is not None]
    return mean(known) if known else None


def disagree(time_ratio: float, cost_ratio: float) -> bool:
    """Whether a ratio of times cannot be the methods' own, as their propagations tell."""
    return not 1 / APART <= time_ratio / cost_ratio <= APART
