"""The headline: what the runs say, in words made from their numbers."""

from collections.abc import Hashable, Sequence
from statistics import mean

from yopo.evaluation.card import duration, percent
from yopo.report.clock import SHARED, busy, disagree, processor_seconds, undisturbed
from yopo.report.groups import baseline, called, same_hardware, seeds, timed
from yopo.report.lesson import equal_cost, lesson
from yopo.report.records import Run
from yopo.report.score import Score, by_chance, comparable, images_known, trainings_own
from yopo.report.words import unlearnt


def headline(runs: Sequence[Run]) -> list[str]:
    """A few sentences."""
    finished = [r for r in runs if r.result] or [r for r in runs if r.points]
    if not finished:
        return ["No run has finished an epoch yet."]
    whole = [r for r in finished if not r.short]
    scores = comparable(whole) if whole else {}
    taught = lesson(scores)
    sentences = [*taught, *(equal_cost(whole) if taught else [])]
    sentences += [_most_robust(scores)] if scores else []
    if whole and not scores:
        sentences = [
            "These runs were measured with different attacks, radii or images, so their robust "
            "accuracies do not compare. On the same data, `yopo eval` can measure them alike."
        ]
    sentences += _lower(scores)
    sentences += [f"{run.label}: {poor}." for run in whole if (poor := unlearnt(run))]
    codes = sorted({code for score in scores.values() for code in score.warnings})
    if codes:
        sentences.append(f"Warnings of these evaluations: {', '.join(codes)}; see the cards.")
    sentences += _stronger(whole, scores) + ratios(finished, scores)
    sentences += [] if taught else equal_cost(whole)
    if short := [r.label for r in finished if r.short]:
        sentences.append(
            f"Trained for their time alone, the first epochs of their recipes: {', '.join(short)}."
        )
    left_out = [r.label for r in runs if r not in finished]
    if left_out:
        sentences.append(f"Not finished, and not counted here: {', '.join(left_out)}.")
    return sentences


def _lower(scores: dict[Run, Score]) -> list[str]:
    """What the trainings measured, where a quick evaluation flatters."""
    alike: dict[str, list[str]] = {}
    for run, score in scores.items():
        if own := trainings_own(run, score):
            share = f"{100 * own.share:.2f}%"
            words = share if len(scores) == 1 else f"{run.label} {share}"
            how = own.words.replace("of ", "of all ", 1).replace(" withstand ", " withstood ", 1)
            alike.setdefault(how, []).append(words)
    return [
        f"At the end of training a smaller part {how}: {', '.join(shares)}."
        for how, shares in alike.items()
    ]


def _stronger(runs: Sequence[Run], scores: dict[Run, Score]) -> list[str]:
    """What AutoAttack leaves, where the comparison is without it."""
    alike: dict[tuple[str, Hashable], list[tuple[float, str]]] = {}
    known = images_known(runs)
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
    cost = _propagations(group) / _propagations(rivals)
    mine, yours = processor_seconds(group), processor_seconds(rivals)
    spent = f"{name} made {cost:.2f} of {other}'s propagations"
    if mine and yours:
        used = f"took {mine / yours:.2f} of {other}'s processor time and "
        spent = f"{name} {used}made {cost:.2f} of its propagations"
    busy_while = f"The machine was busy while {name} or {other} trained"
    if ours is None or theirs is None:
        took = {run: words for run in (*group, *rivals) if (words := busy(run))}
        how = "; ".join(f"{run.label}'s {words}" for run, words in took.items())
        return f"{busy_while} ({how}), so their times do not compare; {spent}"
    if mine and yours and not 1 / SHARED <= (mine / ours) / (yours / theirs) <= SHARED:
        had = f"{name} had {mine / ours:.2f} processors to itself, {other} {yours / theirs:.2f}"
        return f"{busy_while} ({had}), so their times do not compare; {spent}"
    if disagree(ours / theirs, cost):
        apart = ours / theirs / cost
        slow, fast = (name, other) if apart > 1 else (other, name)
        return (
            f"{busy_while}: a propagation of {slow} took {max(apart, 1 / apart):.1f} times as long "
            f"as one of {fast}. So their times do not compare; {spent}"
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


def _propagations(runs: Sequence[Run]) -> float:
    return mean(r.spent("propagations") or 0.0 for r in runs)


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
    close = [pair for pair in order[1:] if by_chance(best, pair[1])]
    if not close:
        return f"{name} is the most robust of {len(scores)} runs: {text}."
    others = ", ".join(f"{other} with {100 * score.share:.2f}%" for other, score in close)
    return (
        f"{name} has the highest robust accuracy of {len(scores)} runs: {text}. By these images "
        f"alone, its lead over {others} may be chance."
    )


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
