"""What our runs of one of the paper's tables found, from their folders alone: `summary`."""

from collections.abc import Collection, Sequence
from math import isclose
from pathlib import Path
from statistics import mean
from typing import Any

from yopo.paper.beside import differs
from yopo.paper.reproduction import CONTROLS, QUICK, TABLES, Reproduction, in_bench
from yopo.paper.tables import paper, paper_table
from yopo.report.clock import busy
from yopo.report.groups import same_hardware, timed
from yopo.report.records import Run, read_runs
from yopo.report.words import notes

Summary = dict[str, Any]  # what tableN.json holds
BUSY = "The machine was busy, so that the time of training does not count"
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
    measured = {row: _row(what, row, group) if group else None for row, group in runs.items()}
    told = _notes(name, [run for group in runs.values() for run in group])
    base = measured[what.against]
    for row, r in measured.items():
        if r and base and "recipe_seconds" in r and "recipe_seconds" in base:
            if same_hardware(timed([*runs[row], *runs[what.against]])):
                r["time_ratio"] = r["recipe_seconds"] / base["recipe_seconds"]
            else:
                told.append(f"{row}: on other hardware than {what.against}, so no time ratio.")
    return {
        "table": name,
        "against": what.against,
        "rows": measured,
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
    values: dict[str, Any] = {
        "seeds": [run.config["seed"] for run in done],
        "unfinished": [run.config["seed"] for run in runs if not run.result],
        "epochs": lengths[0],
        "recipe_epochs": what.config(row, quick=quick).epochs,
    }
    if not done:
        return values
    if alone := timed(done):
        seconds = mean(run.spent("train_seconds") or 0.0 for run in alone)
        values |= {
            "timed": [run.config["seed"] for run in alone],
            "train_seconds": seconds,
            "epoch_seconds": seconds / values["epochs"],
            "recipe_seconds": seconds / values["epochs"] * values["recipe_epochs"],
        }
    attacks = dict.fromkeys(attack for run in done for attack in _shares(run))
    return values | {
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
    best: dict[str, tuple[int, str, float]] = {}
    for e in (e for e in run.evaluations.values() if "last" in run.weights(e) and _own_eps(run, e)):
        shares = {name: (a.get("settings", ""), a["accuracy"]) for name, a in e["attacks"].items()}
        if len(shares) > 2:  # clean is one
            attacks = ", ".join(sorted({*shares} - {"clean"}))
            shares[WORST] = f"over {attacks}", e["worst"]["accuracy"]
        for attack, (how, share) in shares.items():
            here = (e["about"]["images"], how, share)
            best[attack] = max(best.get(attack, here), here, key=lambda measured: measured[0])
    return best


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


def _notes(name: str, runs: Sequence[Run]) -> list[str]:
    """What a reader must know about these runs."""
    noted: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    warned: dict[str, list[str]] = {}
    for run in runs:
        if how := differs(run, paper()["tables"][name]):
            others.setdefault(how, []).append(run.name)
        disturbed = run.result and not run.shared and busy(run)
        for note in [*notes(run), *([f"{BUSY} ({disturbed})."] if disturbed else [])]:
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
        f"{row} (seed{'s' if len(each) > 1 else ''} {', '.join(each)})"
        for row, each in seeds.items()
    )


def _place(environment: dict[str, Any]) -> str:
    """Hardware and torch; our own version says less than the commit."""
    packages = str(environment.get("packages", "")).split(", ")
    torch = [package for package in packages if package.startswith("torch ")]
    return ", ".join([*filter(None, [environment.get("hardware")]), *torch])
