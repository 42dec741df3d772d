"""The headline: what the runs say, in words made from their numbers."""

from collections.abc import Callable, Hashable, Sequence
from math import hypot
from statistics import mean
from typing import NamedTuple

from yopo.evaluation.card import duration, percent
from yopo.evaluation.result import Interval, wilson
from yopo.report.clock import busy, disagree, undisturbed
from yopo.report.groups import baseline, called, same_hardware, seeds, timed
from yopo.report.records import Run, strength
from yopo.report.words import unlearnt


class Score(NamedTuple):
    """A robust accuracy, and what must be equal for two of them to be compared."""

    share: float
    interval: Interval
    kind: Hashable
    words: str  # "of 200 test images withstand pgd-20"
    warnings: tuple[str, ...] = ()  # codes
    clean: float | None = None  # accuracy on the same images without an attack
    strength: tuple[int, ...] = ()


def headline(runs: Sequence[Run]) -> list[str]:
    """A few sentences."""
    finished = [r for r in runs if r.result] or [r for r in runs if r.points]
    if not finished:
        return ["No run has finished an epoch yet."]
    whole = [r for r in finished if not r.short]
    scores = comparable(whole) if whole else {}
    sentences = [_most_robust(scores)] if scores else []
    if whole and not scores:
        sentences = [
            "These runs were measured with different attacks, radii or images, so their robust "
            "accuracies do not compare. On the same data, `yopo eval` can measure them alike."
        ]
    sentences += [f"{run.label}: {poor}." for run in whole if (poor := unlearnt(run))]
    codes = sorted({code for score in scores.values() for code in score.warnings})
    if codes:
        sentences.append(f"Warnings of these evaluations: {', '.join(codes)}; see the cards.")
    sentences += _stronger(whole, scores) + ratios(finished, scores)
    if short := [r.label for r in finished if r.short]:
        sentences.append(
            f"Trained for their time alone, the first epochs of their recipes: {', '.join(short)}."
        )
    left_out = [r.label for r in runs if r not in finished]
    if left_out:
        sentences.append(f"Not finished, and not counted here: {', '.join(left_out)}.")
    return sentences


def comparable(runs: Sequence[Run]) -> dict[Run, Score]:
    """The strongest evaluation that all runs have of one kind, else their own PGD; else nothing."""
    known = _images_known(runs)
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


def _stronger(runs: Sequence[Run], scores: dict[Run, Score]) -> list[str]:
    """What AutoAttack leaves, where the comparison is without it."""
    alike: dict[tuple[str, Hashable], list[tuple[float, str]]] = {}
    known = _images_known(runs)
    for run in runs:
        for e in run.evaluations.values():
            score = scores.get(run)
            counted = score and "autoattack" in score.words
            if "autoattack" in e["attacks"] and (weights := run.weights(e)) and not counted:
                which = "last" if "last" in weights else weights[0]  # also where they are both
                about = e["about"]
                how = f"{about['images']:,} images, {about['threat']}, {which} weights"
                key = how, run.same_data(about["images_sha256"] if known else None)
                share = 100 * e["attacks"]["autoattack"]["accuracy"]
                alike.setdefault(key, []).append((share, run.label))
    sentences = []
    for (how, _), left in alike.items():
        order = sorted(left, key=lambda pair: -pair[0])
        words = ", ".join(f"{label} {share:.2f}%" for share, label in order)
        sentences.append(f"AutoAttack leaves {words} ({how}).")
    return sentences


def ratios(runs: Sequence[Run], scores: dict[Run, Score]) -> list[str]:
    """What each fast method's training cost, in parts of its rival's."""
    sentences = []
    groups = [part for part in seeds(runs) if timed(part)]
    for part in groups:
        group, rivals = timed(part), baseline(part[0], runs)
        if not rivals:
            continue
        other = rivals[0].method
        alone = sum(g[0].method == part[0].method for g in groups) == 1
        name = part[0].method if alone and len(part) == 1 else _name(part)
        if not same_hardware([*group, *rivals]):
            sentences.append(
                f"{name} and {other} were trained on different hardware: no time ratio."
            )
            continue
        text = _cost(name, other, group, rivals)
        if part[0].short:
            sentences.append(f"{text}.")
            continue
        others = next(group for group in seeds(runs) if rivals[0] in group)
        if all(r in scores for r in (*part, *others)):  # those that shared a GPU too
            points = [100 * mean(scores[r].share for r in who) for who in (part, others)]
            text += f"; its robust accuracy is {points[0]:.2f}%, {other}'s {points[1]:.2f}%"
            text += f" (mean of {len(others)} seeds)" if len(others) > 1 else ""
        sentences.append(text + ".")
    return sentences


def _cost(name: str, other: str, group: Sequence[Run], rivals: Sequence[Run]) -> str:
    """Time and propagations in parts of the rivals'; no time where the machine was busy."""
    ours, theirs = undisturbed(group), undisturbed(rivals)
    cost = _mean(group, "propagations") / _mean(rivals, "propagations")
    if ours is None or theirs is None:
        took = {run: words for run in (*group, *rivals) if (words := busy(run))}
        how = "; ".join(f"{run.label}'s {words}" for run, words in took.items())
        return (
            f"The machine was busy while {name} or {other} trained ({how}), so their times do not "
            f"compare; {name} made {cost:.2f} of {other}'s propagations"
        )
    if disagree(ours / theirs, cost):
        return (
            f"The machine was busy while {name} or {other} trained: a propagation took "
            f"{ours / theirs / cost:.1f} times as long in one as in the other. So their times do "
            f"not compare; {name} made {cost:.2f} of {other}'s propagations"
        )
    if group[0].short:
        ours, theirs = ours / group[0].config["epochs"], theirs / rivals[0].config["epochs"]
        return (
            f"An epoch of {name} takes {ours / theirs:.2f} of one of {other} "
            f"({duration(ours)} against {duration(theirs)})"
        )
    many = len(group) > 1 or len(rivals) > 1
    return (
        f"{name} trained in {ours / theirs:.2f} of {other}'s time ({duration(ours)} for "
        f"{_epochs(group)} against {duration(theirs)} for {_epochs(rivals)}, by the median epoch"
        f"{', means over runs' if many else ''}), with {cost:.2f} of its propagations"
    )


def _epochs(runs: Sequence[Run]) -> str:
    lengths = sorted({r.config["epochs"] for r in runs})
    return f"{' or '.join(map(str, lengths))} epoch{'' if lengths == [1] else 's'}"


def _mean(runs: Sequence[Run], what: str) -> float:
    return mean(r.spent(what) or 0.0 for r in runs)


def _most_robust(scores: dict[Run, Score]) -> str:
    settings = [_together(group, scores) for group in seeds(list(scores))]
    order = sorted(settings, key=lambda pair: -pair[1].share)
    name, best = order[0]
    share, interval, words = best.share, best.interval, best.words
    text = f"{percent(share, interval)} {words}"
    if len(order) == 1:
        return f"{name}: {text}."
    equal = [other for other, score in order[1:] if score.share == share]
    if equal:
        names = ", ".join([name, *equal[:-1]]) + f" and {equal[-1]}"
        return f"{names} have the same robust accuracy, the highest of {len(scores)} runs: {text}."
    close = [pair for pair in order[1:] if _chance(best, pair[1])]
    if not close:
        return f"{name} is the most robust of {len(scores)} runs: {text}."
    others = ", ".join(f"{other} with {100 * score.share:.2f}%" for other, score in close)
    return (
        f"{name} has the highest robust accuracy of {len(scores)} runs: {text}. By these images "
        f"alone, its lead over {others} may be chance."
    )


def _chance(one: Score, other: Score) -> bool:
    """Whether the difference is within its 95% interval, of two independent shares."""
    half = ((s.interval[1] - s.interval[0]) / 2 for s in (one, other))
    return abs(one.share - other.share) <= hypot(*half)


def _together(group: list[Run], scores: dict[Run, Score]) -> tuple[str, Score]:
    """Seeds of one setting: their mean, and an interval that covers all of theirs."""
    each = [scores[run] for run in group]
    if len(each) == 1:
        return _name(group), each[0]
    interval = min(s.interval[0] for s in each), max(s.interval[1] for s in each)
    score = each[0]._replace(share=mean(s.share for s in each), interval=interval)
    return _name(group), score


def _name(group: list[Run]) -> str:
    return called(group, of="mean of ")


def _images_known(runs: Sequence[Run]) -> bool:
    """Whether all runs and evaluations have digests of their images; earlier versions had none."""
    results = all("test_sha256" in (run.result or {}) for run in runs)
    cards = (e for run in runs for e in run.evaluations.values())
    return results and all("images_sha256" in e["about"] for e in cards)


def _worst(run: Run, known: bool) -> list[Score]:
    """The worst case of each evaluation."""
    scores = []
    for e in run.evaluations.values():
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
    return Score(own[attack], wilson(round(own[attack] * n), n), kind, words)


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
    return Score(point["robust"], wilson(round(point["robust"] * n), n), kind, words)
