"""The page's tables, as values that its template writes: runs, attacks, an evaluation's card."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from yopo.evaluation.card import attacked, circumstances, duration, how
from yopo.report.clock import busy
from yopo.report.records import Run
from yopo.report.score import Score, alone
from yopo.report.words import evaluated_weights

Cell = str | tuple[str, str]  # words, or words with smaller ones under them


class Table(NamedTuple):
    """A table that scrolls in a box of its own; the column `text` holds sentences."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""  # what to know when reading it
    text: int | None = None


class Beside(NamedTuple):
    """A table that stands beside the runs, with what to know when reading it."""

    heading: str
    title: str
    table: Table
    notes: Sequence[str]
    text: str


def runs_table(runs: Sequence[Run], scores: Mapping[Run, Score]) -> Table:
    """Accuracy by the one evaluation that compares all runs, then what training cost."""
    heads = ["run", "clean", "under attack", "training", "propagations", "epochs", "best epoch"]
    tasks = [f"{run.data}, {run.threat}" for run in runs]
    differ = len({*tasks}) > 1
    rows: list[list[Cell]] = []
    for run, task in zip(runs, tasks, strict=True):
        cells: list[Cell] = [(run.name, f"{run.method}, {task}" if differ else run.method)]
        rows.append([*cells, *_accuracies(run, scores.get(run)), *_costs(run)])
    if scores:
        how = f"Under attack: the part {next(iter(scores.values())).words}, with its 95% interval."
        how = how.replace(" withstand ", " that withstand ", 1)
    else:
        how = "Runs that were not measured alike do not compare: how each was stands in its row."
    text = (
        f"{how} Training: time spent processing batches, nothing else. Propagations: full forward "
        "and backward passes per training image; a pass without weight gradients counts ⅔."
    )
    return Table("runs", heads, rows, text)


def _accuracies(run: Run, score: Score | None) -> list[Cell]:
    """Clean and under attack; in the row itself how it was measured, where no other run was so."""
    own = score or alone(run)
    if own is None:
        return ["–", "–"]
    low, high = own.interval
    small = f"{100 * low:.1f}–{100 * high:.1f}" + ("" if score else f" {own.words}")
    clean = "–" if own.clean is None else f"{100 * own.clean:.2f}%"
    return [clean, (f"{100 * own.share:.2f}%", small)]


def _costs(run: Run) -> list[Cell]:
    seconds, cost = run.spent("train_seconds"), run.spent("propagations")
    done = run.lines[-1]["epoch"] if run.lines else 0
    spent = "–" if seconds is None else duration(seconds)
    took = busy(run)
    unsure = "shared a GPU" if run.shared else took and f"the machine was busy: {took}"
    best = (run.result or {}).get("best_epoch", -1)  # -1 where every epoch collapsed
    return [
        (spent, unsure) if unsure else spent,
        "–" if cost is None else f"{cost:.0f}",
        f"{done}" if run.result else f"{done} of {run.config['epochs']}",
        "–" if best < 0 else str(best),
    ]


def own_table(runs: Sequence[Run]) -> Table | None:
    """What each training measured on the test set at its end; None, if none has come so far."""
    results = [run.result or {} for run in runs]
    names = dict.fromkeys(a for r in results for w in ("best", "last") for a in r.get(w, {}))
    pairs = [(attack, which) for attack in names for which in ("best", "last")]
    if not pairs:
        return None
    rows: list[list[Cell]] = []
    for run, result in zip(runs, results, strict=True):
        shares = [result.get(which, {}).get(attack) for attack, which in pairs]
        cells = ["–" if s is None else f"{100 * s:.2f}%" for s in shares]
        rows.append([(run.name, run.method), *cells])
    tasks = "; ".join(dict.fromkeys(f"{run.data}, {run.threat}" for run in runs if run.result))
    text = (
        f"The whole test set ({tasks}), at the end of training, under the short PGD that also "
        "watched over it: with the weights of the best held-out robust accuracy (the last "
        "evaluated ones with evaluate.keep last) and with the last ones. Its steps are 2.5·eps/r, "
        "in L2 at least eps/4, where an evaluation may take others. Numbers differ from those "
        "above because images and attack do; the evaluation above counts."
    )
    return Table("own", ["run", *(f"{a}, {which}" for a, which in pairs)], rows, text)


def attacks_table(runs: Sequence[Run]) -> Table | None:
    """What `yopo eval` found, attack by attack; None if it was not asked."""
    pairs = [(run, e) for run in runs for e in run.strongest_first]
    if not pairs:
        return None
    attacks = list(dict.fromkeys(a for _, e in pairs for a in e["attacks"]))
    heads = ["run", "worst case", *attacks, "images", "weights", "threat"]
    rows = []
    for run, e in pairs:
        about = e["about"]
        cells: list[Cell] = [(run.name, run.method)]
        cells += [_share(e["worst"]) if attacked(e["attacks"]) else "–"]
        cells += [_share(e["attacks"].get(attack)) for attack in attacks]
        rows.append([*cells, f"{about['images']:,}", evaluated_weights(run, e), about["threat"]])
    text = (
        "Test accuracy under each attack by itself, with its 95% interval. Worst case: no attack "
        "broke the image. Every robust accuracy is an upper bound."
    )
    return Table("attacks", heads, rows, text)


def _share(measured: Mapping[str, Any] | None) -> Cell:
    """A share in percent, its interval under it."""
    if measured is None:
        return "–"
    low, high = measured["interval"]
    return f"{100 * measured['accuracy']:.2f}%", f"{100 * low:.1f}–{100 * high:.1f}"


def card(e: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's card; the same values as in eval.md."""
    about = e["about"]
    rows: list[list[Cell]] = []
    for name, a in e["attacks"].items():
        rows.append([name, _share(a), how(a), f"{a['propagations']:.1f}", duration(a["seconds"])])
    if attacked(e["attacks"]):
        rows.append(["worst case", _share(e["worst"]), "", "", ""])
    heads = ["attack", "accuracy, 95% interval", "settings", "propagations", "time"]
    return {
        "what": f"{about['images']:,} images: {about['data']}. {about['threat']}. "
        f"{about['model']}.",
        "warnings": e["warnings"],
        "table": Table("card", heads, rows, text=2),
        "how": f"Evaluated: weights {about['weights']} "
        f"(sha256 of its tensors {about['weights_sha256'][:16]}…), " + circumstances(about),
    }
