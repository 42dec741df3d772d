"""Robust accuracies, and which of them may be compared."""

from collections.abc import Callable, Hashable, Sequence
from math import hypot
from statistics import mean
from typing import NamedTuple

from yopo.evaluation.result import Interval, wilson
from yopo.report.records import Run, strength


class Score(NamedTuple):
    """A robust accuracy, and what must be equal for two of them to be compared."""

    share: float
    interval: Interval
    kind: Hashable
    words: str  # "of 200 test images withstand pgd-20"
    warnings: tuple[str, ...] = ()  # codes
    clean: float | None = None  # accuracy on the same images without an attack
    strength: tuple[int, ...] = ()


def comparable(runs: Sequence[Run]) -> dict[Run, Score]:
    """The strongest evaluation that all runs have of one kind, else their own PGD; else nothing."""
    known = images_known(runs)
    worst = {run: {score.kind: score for score in _worst(run, known)} for run in runs}
    shared = set.intersection(*(set(kinds) for kinds in worst.values()))
    if shared:
        means = {kind: mean(kinds[kind].share for kinds in worst.values()) for kind in shared}
        first = next(iter(worst.values()))  # one kind is as strong in all, but for the own radius
        order = {k: tuple(-part for part in first[k].strength) for k in shared}
        leads = min(shared, key=lambda k: (order[k], means[k], str(k)))  # of equal ones the best's
        return {run: kinds[leads] for run, kinds in worst.items()}
    measures: tuple[Callable[[Run, bool], Score | None], ...] = (_test, _held_out)
    for measure in measures:
        scores = {r: score for r in runs if (score := measure(r, known))}
        if len(scores) == len(runs) and len({s.kind for s in scores.values()}) == 1:
            return scores
    return {}


def alone(run: Run) -> Score | None:
    """A run's own best figure, where it has none in common with the others."""
    worst = _worst(run, known=False)
    return worst[0] if worst else _test(run, known=False) or _held_out(run, known=False)


def trainings_own(run: Run, score: Score | None) -> Score | None:
    """What the training measured, if that is less, and on more test images, than the evaluation."""
    own = _test(run, known=False)
    if own is None or score is None or not score.strength:
        return None
    own_radius, _, images = score.strength
    lower = own_radius and run.result and run.result["test_images"] > images
    return own if lower and own.share < score.share else None


def by_chance(one: Score, other: Score) -> bool:
    """Whether the difference is within its 95% interval, of two independent shares."""
    half = ((s.interval[1] - s.interval[0]) / 2 for s in (one, other))
    return abs(one.share - other.share) <= hypot(*half)


def images_known(runs: Sequence[Run]) -> bool:
    """Whether all runs and evaluations have digests of their images; earlier versions had none."""
    results = all("test_sha256" in (run.result or {}) for run in runs)
    cards = (e for run in runs for e in run.evaluations.values())
    return results and all("images_sha256" in e["about"] for e in cards)


def _worst(run: Run, known: bool) -> list[Score]:
    """The worst case of each evaluation."""
    scores = []
    for e in run.strongest_first:
        about, worst = e["about"], e["worst"]
        attacks = {name: a["settings"] for name, a in e["attacks"].items() if name != "clean"}
        if not attacks:
            continue
        precise = about["precision"] != "bf16"  # TF32 has float32's verdict
        images = about["images_sha256"] if known else None
        same = run.same_data(images), precise, frozenset(attacks.items())
        facts = *(about[k] for k in ("data", "images", "threat")), *same
        under = next(iter(attacks)) if len(attacks) == 1 else f"all of {', '.join(attacks)}"
        words = f"of {about['images']:,} test images withstand {under} ({about['threat']}, "
        codes, interval = tuple(w["code"] for w in e["warnings"]), tuple(worst["interval"])
        scores += [
            Score(
                worst["accuracy"],
                interval,
                (which, *facts),
                f"{words}{which} weights)",
                codes,
                e["attacks"].get("clean", {}).get("accuracy"),
                strength(run.config, e),
            )
            for which in run.weights(e)
        ]
    return scores


def _test(run: Run, known: bool) -> Score | None:
    if not run.result:
        return None
    (which, own), n = run.own, run.result["test_images"]
    attack = next(name for name in own if name != "clean")
    images = run.result["test_sha256"] if known else None
    kind = ("test", run.same_data(images), run.threat, attack, n, which)
    words = f"of {n:,} test images withstand {attack} ({run.threat}, {which} weights)"
    interval = wilson(round(own[attack] * n), n)
    return Score(own[attack], interval, kind, words, clean=own["clean"])


def _held_out(run: Run, known: bool) -> Score | None:
    if not run.points:
        return None
    point = max(run.points, key=lambda p: p["robust"])
    images = run.result["test_sha256"] if known and run.result else None
    n, attack = point["images"], f"pgd-{run.config['evaluate']['steps']}"
    kind = ("held out", run.same_data(images), run.threat, attack)
    words = (
        f"of {n:,} held-out images withstand {attack} ({run.threat}) after epoch {point['epoch']}, "
        "the best"
    )
    interval = wilson(round(point["robust"] * n), n)
    return Score(point["robust"], interval, kind, words, clean=point["clean"])
