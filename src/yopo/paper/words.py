"""A summary of our runs of a table, in the words of a table: ours / the paper's."""

from collections.abc import Sequence
from typing import Any

from yopo.evaluation.card import duration
from yopo.paper.reproduced import WORST, Summary
from yopo.paper.reproduction import TABLES
from yopo.paper.tables import paper
from yopo.report.tables import Cell


def heads(table: Summary) -> list[str]:
    """The columns."""
    over = {r["accuracy"][WORST]["how"] for r in _measured(table) if WORST in r["accuracy"]}
    worst = WORST if len(over) != 1 else over.pop().replace("over ", "worst of ")
    attacks = (worst if attack == WORST else attack for attack in _attacks(table))
    return ["method", *attacks, "training", "time ratio"]


def cells(table: Summary, row: str) -> list[Cell]:
    """One row, ours / the paper's; what stands under a cell is smaller."""
    r, theirs = table["rows"][row], table["paper"][row]
    whole = r is None or r["epochs"] == r["recipe_epochs"]
    shown: list[Cell] = [(row, _status(row, r))]
    for attack in _attacks(table):
        beside = ""
        if attack in _paper_attacks(table) and (whole or attack not in r.get("accuracy", {})):
            beside = f" / {theirs[attack]:.2f}" if theirs else " / –"
        shown.append(_cell(r, attack, beside))
    if not r or "train_seconds" not in r:
        return [*shown, "–", "–"]
    seconds, each = duration(r["train_seconds"]), duration(r["epoch_seconds"])
    recipe = f"{duration(r['recipe_seconds'])} for {r['recipe_epochs']}, extrapolated"
    shown.append(seconds if whole else (seconds, f"{each} an epoch; {recipe}"))
    base = table["rows"][table["against"]]
    measured = whole and base and base["epochs"] == base["recipe_epochs"]
    ratio = f"{r['time_ratio']:.2f}" if "time_ratio" in r else "–"
    if theirs and "minutes" in theirs:
        ratio += f" / {theirs['minutes'] / table['paper'][table['against']]['minutes']:.2f}"
    return [*shown, (ratio, "extrapolated") if "time_ratio" in r and not measured else ratio]


def legend(table: Summary) -> list[str]:
    """How to read the table."""
    theirs, against = paper()["tables"][table["table"]], table["against"]
    on = f"; the paper's on a {theirs['hardware']}" if "hardware" in theirs else ""
    lines = [
        "Accuracies: test set, weights of the last epoch, ours / the paper's, in %; the mean over "
        "seeds, and the lowest and highest seed where there are several.",
        "Time: training alone, without compiling, the mean over seeds (not over those that shared "
        f"a GPU); its ratio is over {against}'s in this table{on}.",
    ]
    if any(WORST in r["accuracy"] for r in _measured(table)):
        lines[0] += " Worst: each image under the strongest for it of these attacks."
    if any(r["epochs"] < r["recipe_epochs"] for r in _measured(table)):
        lines[1] += " Extrapolated: seconds an epoch times the recipe's epochs."
    return lines


def notes(table: Summary) -> list[str]:
    """What a reader must know about the rows."""
    told = []
    if pairs := plain_ratios(table):
        told.append(
            "The same ratio between the loops written plainly (`literal` in `yopo bench`: "
            f"milliseconds a step times the recipe's epochs; {table['literal']['on']}): "
            f"{', '.join(pairs)}."
        )
    return [*told, *_best(table), *subsets(table), *table["notes"]]


def plain_ratios(table: Summary) -> list[str]:
    """Time ratios of the loops written plainly, with ours: "YOPO-5-3 0.31 (ours 0.30)"."""
    pairs = []
    for row, ratio in (table["literal"] or {"ratio": {}})["ratio"].items():
        ours = (table["rows"][row] or {}).get("time_ratio")
        pairs.append(f"{row} {ratio:.2f}" + (f" (ours {ours:.2f})" if ours else ""))
    return pairs


def _best(table: Summary) -> list[str]:
    """Rows that end less robust, or more, than they were at their best."""
    whole = {row: r for row, r in table["rows"].items() if r and r["epochs"] == r["recipe_epochs"]}
    rows = {row: r["trainer"] for row, r in whole.items() if "trainer" in r}
    pairs = [
        f"{row} {_shown(t['best'])} (last {_shown(t['last'])})"
        for row, t in rows.items()
        if t["best"] != t["last"]
    ]
    if not pairs:
        return []
    attack = next(iter(rows.values()))["attack"]
    return [
        "With the weights of the best held-out robust accuracy instead of the last, clean / "
        f"{attack} as `yopo train` measures it (steps of 2.5·eps/r): {', '.join(pairs)}."
    ]


def _shown(pair: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.2f}" for share in pair)


def subsets(table: Summary) -> list[str]:
    """Rows that were not attacked on the whole test set, and attacks that were not the same."""
    rows: dict[tuple[str, int, int], list[str]] = {}
    for row, r in table["rows"].items():
        for attack, a in (r or {}).get("accuracy", {}).items():
            if r and a["images"] == _images(r) != r["test_images"]:
                rows.setdefault((attack, a["images"], r["test_images"]), []).append(row)
    alike: dict[tuple[int, int, tuple[str, ...]], list[str]] = {}
    for (attack, n, all_), names in rows.items():
        alike.setdefault((n, all_, (*names,)), []).append(attack)
    return [
        f"{', '.join(attacks)}: on {n:,} of the {all_:,} test images for {', '.join(names)}."
        for (n, all_, names), attacks in alike.items()
    ] + _unlike(table)


def _unlike(table: Summary) -> list[str]:
    """Attacks that were not the same for all rows."""
    ways: dict[str, dict[str, list[str]]] = {}
    for row, r in table["rows"].items():
        for attack, a in (r or {}).get("accuracy", {}).items():
            ways.setdefault(attack, {}).setdefault(a["how"], []).append(row)
    return [
        f"{attack}: {how} for {', '.join(rows)}."
        for attack, rows_of in ways.items()
        if len(rows_of) > 1
        for how, rows in rows_of.items()
    ]


def _measured(table: Summary) -> list[dict[str, Any]]:
    """The rows that have a finished run."""
    return [r for r in table["rows"].values() if r and "accuracy" in r]


def _images(r: dict[str, Any]) -> int:
    """The most that any of its attacks was run on."""
    return max(int(a["images"]) for a in r["accuracy"].values())


def _attacks(table: Summary) -> list[str]:
    ours = [a for r in _measured(table) for a in r["accuracy"]]
    return list(dict.fromkeys([*_paper_attacks(table), *ours]))


def _paper_attacks(table: Summary) -> list[str]:
    return ["clean", *TABLES[table["table"]].attacks]


def _status(row: str, r: dict[str, Any] | None) -> str:
    if r is None:
        return "not run"
    if not r["seeds"]:
        return "not finished"
    n, less = len(r["seeds"]), len(r["unfinished"])
    words = [f"{n} seed{'s' if n > 1 else ''}"]
    words += [f"{less} more not finished"] if less else []
    if r["epochs"] < r["recipe_epochs"]:
        words.append(f"{r['epochs']} of {r['recipe_epochs']} epochs")
    elif "epochs" not in row:
        words.append(f"{r['epochs']} epochs")
    return ", ".join(words)


def _cell(r: dict[str, Any] | None, attack: str, beside: str) -> Cell:
    a = (r or {}).get("accuracy", {}).get(attack)
    if r is None or a is None:
        return f"–{beside}"
    small = []
    if a["seeds"] > 1:
        small.append(f"{100 * a['low']:.2f}–{100 * a['high']:.2f}")
    if a["seeds"] != len(r["seeds"]):
        small.append(f"{a['seeds']} of {len(r['seeds'])} seeds")
    if a["images"] < _images(r):
        small.append(f"of {a['images']:,} images")
    share = f"{100 * a['mean']:.2f}{beside}"
    return (share, ", ".join(small)) if small else share
