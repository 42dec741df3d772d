"""The paper's tables, run: each row trained with its recipe and attacked as in the paper.

>>> reproduce("table2", Path("runs/table2"), ["PGD-10", "YOPO-5-3"], How(seeds=(0, 1, 2)))["rows"]

What is finished is not done again, so the same call goes on after an interruption.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from yopo.attacks.names import parse, parse_all
from yopo.evaluation.card import settings
from yopo.paper.reproduced import Summary, summary
from yopo.paper.reproduction import TABLES, Reproduction, folder
from yopo.report.records import read_runs
from yopo.runs.api import evaluate_run, train_run
from yopo.runs.distributed import pick_device
from yopo.runs.evaluating import choose_threat
from yopo.runs.folder import (
    EVALUATION,
    LAST,
    LAST_EVALUATION,
    is_finished,
    is_run,
    mark_untimed,
    settle_untimed,
)
from yopo.runs.overlay import Tree
from yopo.runs.progress import Logged, Watcher
from yopo.runs.settings import Config, validate

QUICK_SAMPLES = 300
Watching = Callable[[Path, Config], AbstractContextManager[Watcher]]  # of each training
Evaluate = Callable[..., object]  # as evaluate_run


@dataclass(frozen=True, slots=True)
class How:
    """What a reproduction does beside, or instead of, what the paper did."""

    seeds: Sequence[int] = (0,)  # of each row
    epochs: int | None = None  # fewer than the recipes': for times alone
    quick: bool = False  # embedded digits, minutes on a CPU
    attacks: Sequence[str] = ()  # more than the paper's
    samples: int | None = None  # test images for those; all by default
    untimed: bool = False  # several at once on one GPU: their time does not count
    device: str | None = None  # by default a GPU if there is one

    def check(self) -> None:
        """Refuse what does not go together."""
        if self.samples is not None and not self.attacks:
            raise ValueError("--samples is for --attacks; the paper's attacks take all test images")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"expected --samples of at least 1, got {self.samples}")
        if self.epochs is not None and self.attacks:
            raise ValueError(
                "--epochs is for times alone, without --attacks; leave one of them out"
            )

    def attacks_on(self, table: Reproduction) -> tuple[list[str], list[str]]:
        """The paper's attacks, and those that come to them."""
        usual = ["clean", *table.attacks]
        asked = [attack.name for attack in parse_all(self.attacks)] if self.attacks else []
        more = [name for name in asked if name not in usual]
        parse_all([*usual, *more])
        return usual, more


def reproduce(
    name: str,
    out: Path,
    rows: Sequence[str] | None = None,
    how: How = How(),  # noqa: B008
    *,
    watched: Watching = lambda *_: nullcontext(Logged()),
    evaluate: Evaluate = evaluate_run,
) -> Summary:
    """A table of the paper, or some of its rows: run what is missing, and sum up what is there.

    name: "table1" to "table4". how: seeds, further attacks and the like. watched: opened with each
    run's folder and settings, to watch it. evaluate: called as `evaluate_run`. Each row's runs are
    in out/row-seed-N. One attack more runs those before it anew, for the worst case over all.
    """
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
    how.check()
    table = TABLES[name]
    how.attacks_on(table)  # all is checked before hours of training
    for path in train_rows(name, out, rows, how, watched):
        if how.epochs is None:  # a shorter run is for its time
            _attack(table, path, how, evaluate)
    return summary(name, out)


def train_rows(
    name: str, out: Path, rows: Sequence[str] | None, how: How, watched: Watching
) -> Iterator[Path]:
    """Each row's run folder for each seed, when it is trained; all rows where none are named."""
    wanted = _wanted(name, out, rows, how)
    for path, config in wanted.items():  # all checked first
        _check(path, config)
    for path, config in wanted.items():
        if not is_finished(path):
            begun = is_run(path)
            if how.untimed:
                mark_untimed(path)
            with watched(path, config) as watch:
                train_run(
                    config, path, resume=begun, device=how.device, watch=watch, name=path.name
                )
        settle_untimed(path)
        yield path


def _wanted(name: str, out: Path, rows: Sequence[str] | None, how: How) -> dict[Path, Config]:
    """The settings of each row and seed, by its folder."""
    table = TABLES[name]
    wanted: dict[Path, Config] = {}
    for row in rows or table.recipes:
        if row not in table.recipes:
            raise ValueError(f"no row {row!r} in {name}; it has {', '.join(table.recipes)}")
        most = table.config(row, quick=how.quick).epochs
        if how.epochs is not None and not 1 <= how.epochs < most:
            raise ValueError(f"expected --epochs under {row}'s {most}, got {how.epochs}")
        for seed in how.seeds:
            config = table.config(row, seed=seed, quick=how.quick, epochs=how.epochs)
            wanted[out / f"{folder(row)}-seed-{seed}"] = config
        epochs = how.epochs or most
        for path in table.folders(row, out).values():  # a table has one length a row
            if path not in wanted and (n := _settings(path)["epochs"]) != epochs:
                raise ValueError(
                    f"{path} was trained for {n} epochs, not {epochs}; give another --out"
                )
    return wanted


def _check(path: Path, config: Config) -> None:
    """Refuse a folder that holds a run of other settings."""
    if not is_run(path):
        return
    there = _settings(path)
    free = ("evaluate", "checkpoint", "diagnose", "engine", "notes")  # not of what is trained
    other = [k for k, v in config.tree().items() if k not in free and there[k] != v]
    if other:
        raise ValueError(
            f"{path} holds a run of other settings ({', '.join(other)}); give another --out"
        )


def _settings(path: Path) -> Tree:
    return validate(read_runs([path])[0].config).tree()


def _attack(table: Reproduction, path: Path, how: How, evaluate: Evaluate) -> None:
    """The paper's attacks on the last weights and all test images, and more where asked for.

    What is asked for on fewer images is an evaluation of its own, of that weights file.
    """
    (usual, more), step = how.attacks_on(table), None if how.quick else table.step
    gpu = pick_device(how.device).type == "cuda"
    most = QUICK_SAMPLES if how.quick else None
    if how.samples is None:
        plans = [(path, [*usual, *more], most)]
    else:
        plans = [(path, usual, most)]
        if not {*more} <= {*_attacked(path / EVALUATION, most, step)}:
            plans.append((path / LAST, ["clean", *more], how.samples))
    for target, attacks, samples in plans:
        file = path / (EVALUATION if target == path else LAST_EVALUATION)
        met = _attacked(file, samples, step)
        if not {*attacks} <= {*met}:
            every = list(dict.fromkeys([*attacks, *met]))  # what is there stays there
            evaluate(
                target,
                ",".join(every),
                weights="last" if target == path else None,
                samples=samples,
                step=step,
                batch=1000 if gpu else 500,
                precision="tf32" if gpu else "float32",
                compile=gpu and "autoattack" in every,
                device=how.device,
            )


def _attacked(file: Path, samples: int | None, step: float | None) -> list[str]:
    """The attacks that the last weights met as the table asks: these images, eps and steps."""
    (run,) = read_runs([file.parent])
    if (there := run.evaluations.get(file.name)) is None or not run.result:
        return []
    threat, about = choose_threat(validate(run.config)), there["about"]
    images = min(samples or run.result["test_images"], run.result["test_images"])
    if "last" not in run.weights(there) or (about["images"], about["eps"]) != (images, threat.eps):
        return []
    met = {name: a["settings"] for name, a in there["attacks"].items()}
    return [name for name, how in met.items() if how == settings(parse(name), threat, step)]
