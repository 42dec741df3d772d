"""A table of the paper beside our runs of it, from their folders alone."""

from collections.abc import Collection, Sequence
from math import isclose
from pathlib import Path
from statistics import mean
from typing import Any

from yopo.evaluation.card import duration
from yopo.paper.reproduction import CONTROLS, QUICK, TABLES, Reproduction, in_bench
from yopo.paper.tables import paper, paper_table
from yopo.report.headline import same_hardware, timed
from yopo.report.paper import differs
from yopo.report.records import Run, read_runs
from yopo.report.tables import Cell

Summary = dict[str, Any]  # what tableN.json holds
OTHER = "Not the table's setting"
WORST = "worst case"


def summary(
    name: str,
    out: Path,
    bench: dict[str, Any] | None = None,
    rows: Collection[str] | None = None,
) -> Summary:
    """The table, or some of its rows, as the run folders in `out` have them; None for no run.

    `bench` is what `yopo bench --json` wrote for the table's network.
    """
    what, theirs = TABLES[name], paper_table(name)
    wanted = [row for row in what.recipes if rows is None or row in {*rows, what.against}]
    runs = {row: read_runs(list(what.folders(row, out).values())) for row in wanted}
    found = {row: _row(what, row, group) if group else None for row, group in runs.items()}
    told = _told(name, [run for group in runs.values() for run in group])
    base = found[what.against]
    for row, r in found.items():
        if r and base and "recipe_seconds" in r and "recipe_seconds" in base:
            if same_hardware(timed([*runs[row], *runs[what.against]])):
                r["time_ratio"] = r["recipe_seconds"] / base["recipe_seconds"]
            else:
                told.append(f"{row}: on other hardware than {what.against}, so no time ratio.")
    return {
        "table": name,
        "against": what.against,
        "rows": found,
        "paper": {r: None if r in CONTROLS else theirs.get(r.split(" ")[0]) for r in wanted},
        "literal": bench and _literal(name, bench, wanted),
        "notes": told,
    }


def _row(what: Reproduction, row: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds that are finished."""
    done = [run for run in runs if run.result]
    lengths = sorted({run.config["epochs"] for run in done or runs})
    if len(lengths) > 1:
        raise ValueError(
            f"{row}: expected seeds of the same number of epochs, got {lengths}; "
            "keep the shorter ones in another folder"
        )
    quick = str(runs[0].config.get("notes")).endswith(QUICK["notes"])
    found: dict[str, Any] = {
        "seeds": [run.config["seed"] for run in done],
        "unfinished": [run.config["seed"] for run in runs if not run.result],
        "epochs": lengths[0],
        "recipe_epochs": what.config(row, quick=quick).epochs,
    }
    if not done:
        return found
    if alone := timed(done):
        seconds = mean(run.spent("train_seconds") or 0.0 for run in alone)
        found |= {
            "timed": [run.config["seed"] for run in alone],
            "train_seconds": seconds,
            "epoch_seconds": seconds / found["epochs"],
            "recipe_seconds": seconds / found["epochs"] * found["recipe_epochs"],
        }
    attacks = dict.fromkeys(attack for run in done for attack in _shares(run))
    return found | {
        "propagations": mean(run.spent("propagations") or 0.0 for run in done),
        "test_images": min(run.result["test_images"] for run in done if run.result),
        "accuracy": {attack: _accuracy(done, attack) for attack in attacks},
        "trainer": _trainer([run.result for run in done if run.result]),
    }


def _trainer(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the trainer itself measured on the test set: clean and robust, best and last weights."""
    attack = next(key for key in results[0]["last"] if key != "clean")
    results = [r for r in results if attack in r["last"]]  # others were measured otherwise
    shares = {
        which: [mean(r.get(which, r["last"])[key] for r in results) for key in ("clean", attack)]
        for which in ("best", "last")
    }
    return {"attack": attack, **shares}


def _shares(run: Run) -> dict[str, tuple[int, str, float]]:
    """For each attack on the run's last weights, over the most images: how many, how, accuracy."""
    found: dict[str, tuple[int, str, float]] = {}
    for e in (e for e in run.evaluations.values() if "last" in run.weights(e) and _own_eps(run, e)):
        shares = {name: (a.get("settings", ""), a["accuracy"]) for name, a in e["attacks"].items()}
        if len(shares) > 2:  # clean is one
            attacks = ", ".join(sorted({*shares} - {"clean"}))
            shares[WORST] = f"over {attacks}", e["worst"]["accuracy"]
        for attack, (how, share) in shares.items():
            here = (e["about"]["images"], how, share)
            found[attack] = max(found.get(attack, here), here, key=lambda found: found[0])
    return found


def _own_eps(run: Run, evaluation: dict[str, Any]) -> bool:
    """Whether it was attacked at the radius that it was trained for."""
    return isclose(evaluation["about"]["eps"], run.config["threat"]["eps"], rel_tol=1e-3)


def _accuracy(runs: Sequence[Run], attack: str) -> dict[str, Any]:
    """Over seeds that were attacked alike: on the most images there are, then most of the seeds."""
    alike: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        if attack in (shares := _shares(run)):
            n, how, share = shares[attack]
            alike.setdefault((n, how), []).append(share)
    (images, how), values = max(alike.items(), key=lambda item: (item[0][0], len(item[1])))
    spread = {"low": min(values), "high": max(values)}
    return {"mean": mean(values), **spread, "seeds": len(values), "images": images, "how": how}


def _literal(name: str, bench: dict[str, Any], rows: Sequence[str]) -> dict[str, Any]:
    """Time ratios of the literal loops: milliseconds a step times the recipe's epochs."""
    what, model = TABLES[name], paper()["tables"][name]["model"]
    if bench["model"] != model:
        raise ValueError(f"expected a bench of {model} beside {name}, got one of {bench['model']}")
    steps = {r["method"]: r.get("literal") for r in bench["rows"]}
    ours = [row for row in rows if row not in CONTROLS]  # theirs would be a ratio of epochs alone
    spent = {row: ms * what.config(row).epochs for row in ours if (ms := steps.get(in_bench(row)))}
    base = spent.pop(what.against, None)
    ratios = {row: cost / base for row, cost in spent.items()} if base else {}
    return {"ratio": ratios, "on": f"{bench['device']}, batch {bench['batch']}"}


def _told(name: str, runs: Sequence[Run]) -> list[str]:
    """What a reader must know about these runs."""
    noted: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    warned: dict[str, list[str]] = {}
    for run in runs:
        if how := differs(run, paper()["tables"][name]):
            others.setdefault(how, []).append(run.name)
        for note in run.notes:
            noted.setdefault(note, []).append(run.name)
        codes = [w["code"] for e in run.evaluations.values() for w in e["warnings"]]
        for code in dict.fromkeys(codes):
            warned.setdefault(code, []).append(run.name)
    told = [f"{_named(names)}: {note}" for note, names in noted.items()]
    told += [
        f"Warning {code} (docs/warnings.md) of the evaluation of {_named(names)}."
        for code, names in warned.items()
    ]
    places = [_place(run.environment) for run in runs]
    told += [f"Trained on {place}." for place in dict.fromkeys(filter(None, places))]
    return [f"{OTHER}: {_named(o)} ({how})." for how, o in others.items()] + told


def _named(runs: Sequence[str]) -> str:
    """ "pgd-10-seed-1", "pgd-10-seed-2" as "pgd-10 (seeds 1, 2)"."""
    seeds: dict[str, list[str]] = {}
    for run in runs:
        row, _, seed = run.rpartition("-seed-")
        seeds.setdefault(row, []).append(seed)
    return ", ".join(
        f"{row} (seed{'s' if len(found) > 1 else ''} {', '.join(found)})"
        for row, found in seeds.items()
    )


def _place(environment: dict[str, Any]) -> str:
    """Hardware and torch; our own version says less than the commit."""
    packages = str(environment.get("packages", "")).split(", ")
    torch = [package for package in packages if package.startswith("torch ")]
    return ", ".join([*filter(None, [environment.get("hardware")]), *torch])


# ---------------------------------------------------------------- shown


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
    found = []
    if pairs := literal(table):
        found.append(
            "The same ratio between the loops written plainly (`literal` in `yopo bench`: "
            f"milliseconds a step times the recipe's epochs; {table['literal']['on']}): "
            f"{', '.join(pairs)}."
        )
    found += _best(table) + subsets(table)
    found.extend(table["notes"])
    return found


def literal(table: Summary) -> list[str]:
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
        for attack, found in ways.items()
        if len(found) > 1
        for how, rows in found.items()
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
