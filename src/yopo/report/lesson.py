"""What the runs teach a newcomer: what natural training lacks, and what robustness costs."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from yopo.methods.registry import ENTRIES
from yopo.report.groups import baseline, called, seeds
from yopo.report.records import Run
from yopo.report.score import Score, by_chance

EQUAL = 0.1  # totals of propagations that differ by less are equal cost


def lesson(scores: Mapping[Run, Score]) -> list[str]:
    """Natural training without and under attack, then each method's robustness with its price.

    Nothing, unless natural training and another are there, and the other is clearly more robust.
    """
    known = {run: s for run, s in scores.items() if s.clean is not None}
    natural = [run for run in known if not _attacks(run)]
    groups = seeds([run for run in known if run not in natural])
    if not natural or not groups:
        return []
    best = max((known[run] for group in groups for run in group), key=lambda s: s.share)
    worst = max((known[run] for run in natural), key=lambda s: s.share)
    if by_chance(best, worst) or best.share < worst.share:
        return []
    attacked = worst.words.replace(" withstand ", " once attacked with ", 1)
    told = [
        f"Natural training answers {_percent(_clean(known, natural))} of the clean images right, "
        f"and {_percent(_share(known, natural))} {attacked}."
    ]
    prices, unit = [], " propagations per training image"
    for group in groups:
        spent = mean(run.spent("propagations") or 0.0 for run in group)
        shares = f"{_percent(_share(known, group))} ({_percent(_clean(known, group))} clean)"
        prices.append(f"{called(group, of='mean of ')} keeps {shares} for {spent:.0f}{unit}")
        unit = ""
    base = mean(run.spent("propagations") or 0.0 for run in natural)
    return [
        *told,
        f"What robustness costs: under that attack {'; '.join(prices)}; natural training made "
        f"{base:.0f}.",
    ]


def equal_cost(runs: Sequence[Run]) -> list[str]:
    """Each fast method beside its rival after as many propagations, from their curves."""
    told = []
    for group in seeds([run for run in runs if run.points and not run.short]):
        rivals = [run for run in baseline(group[0], runs) if run.points]
        if not rivals or len({_measured(run) for run in (*group, *rivals)}) > 1:
            continue
        ours, theirs = (mean(r.spent("propagations") or 0.0 for r in g) for g in (group, rivals))
        name, other = called(group, of="mean of "), called(rivals, of="mean of ")
        if abs(ours - theirs) <= EQUAL * max(ours, theirs):
            told.append(
                f"{name} and {other} compare at equal cost: {ours:.0f} and {theirs:.0f} "
                "propagations per image."
            )
            continue
        less, more = (group, rivals) if ours < theirs else (rivals, group)
        cheap, dear = (name, other) if ours < theirs else (other, name)
        budget = min(ours, theirs)
        there = [at for run in less if (at := _at(run, budget))]
        then = [at for run in more if (at := _at(run, budget))]
        if len(there) < len(less) or len(then) < len(more):
            continue
        shares = [100 * mean(p["robust"] for p in points) for points in (there, then)]
        told.append(
            f"At equal cost, the {budget:.0f} propagations per image of {cheap}'s training, "
            f"{cheap} keeps {shares[0]:.2f}% of held-out images under "
            f"pgd-{group[0].config['evaluate']['steps']}, {dear} {shares[1]:.2f}% after "
            f"{mean(p['propagations'] for p in then):.0f}; {dear} was then in the middle of a "
            f"training planned for longer. `yopo compare --propagations {budget:.0f}` trains each "
            "to the same cost."
        )
    return told


def _attacks(run: Run) -> bool:
    """Whether its method trains against an adversary."""
    entry = ENTRIES.get(run.config["method"]["name"])
    return entry is None or entry.attacks


def _measured(run: Run) -> tuple[Any, ...]:
    """What must be equal for held-out accuracies of two runs to be compared."""
    return run.data, run.threat, run.config["evaluate"]["steps"], run.points[0]["images"]


def _at(run: Run, budget: float) -> dict[str, Any] | None:
    """The last full evaluation within so many propagations; of the cheaper seeds, their last."""
    within = [p for p in run.points if p["propagations"] <= 1.01 * budget]
    return within[-1] if within else None


def _share(scores: Mapping[Run, Score], group: Sequence[Run]) -> float:
    return mean(scores[run].share for run in group)


def _clean(scores: Mapping[Run, Score], group: Sequence[Run]) -> float:
    return mean(scores[run].clean or 0.0 for run in group)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
