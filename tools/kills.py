"""Kill training runs at random moments, resume them, and compare all bits with the unkilled run.

Every run goes through `yopo train --resume`'s own code, in a process forked from this one, on one
thread; in half of the starts checkpoints are written beside the training, as those of large
networks are. A third of the kills come from outside at a random time. The others the process does
to itself, with SIGKILL, at the k-th of a kind of call: of what writes (half of a file is there
then), or of a step, an evaluation, a rollback.

examples:
  python -m tools.kills --kills 40 --out /tmp/kills
  python -m tools.kills --kills 1000 --seed 1 --out records/kills-cpu
  python -m tools.kills --kills 60 --only free,pmp
"""

import argparse
import builtins
import io
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import yopo.runs.trainer
from yopo import Step
from yopo.cli.training import lost_others_are_named
from yopo.core import seals, tensor_files
from yopo.core.digest import tensors_digest
from yopo.core.parallel import part
from yopo.runs import state, writing
from yopo.runs.api import train_run
from yopo.runs.epoch_end import EpochEnd
from yopo.runs.folder import BEST, LAST
from yopo.runs.keeper import Keeper
from yopo.runs.overlay import Tree, overlay
from yopo.runs.settings import validate
from yopo.runs.trainer import Trainer

METHODS: dict[str, Tree] = {
    "natural": {"name": "natural"},
    "pgd": {"name": "pgd", "steps": 2},
    "free": {"name": "free", "m": 2},
    "fast": {"name": "fast"},
    "nfgsm": {"name": "nfgsm"},
    "trades": {"name": "trades", "steps": 2},
    "yopo-after": {"name": "yopo", "m": 2, "n": 2, "grad_at": "after"},
    "yopo-before": {"name": "yopo", "m": 2, "n": 2, "grad_at": "before"},
    "yopo-last": {"name": "yopo", "m": 2, "n": 2, "grad_at": "last"},
    "trades-yopo": {"name": "trades-yopo", "m": 2, "n": 2},
    "pmp": {"name": "pmp", "m": 2, "n": 2},
}
BASE: Tree = {
    "threat": {"eps": 0.1},
    "data": {"name": "npz", "held_out": 20},
    "optimizer": {"lr": 0.1},
    "schedule": {"name": "cosine", "warmup": 1},
    "evaluate": {"steps": 2, "images": 20},
    "epochs": 4,
    "batch": 20,
}
SMALL: Tree = {
    "name": "smallcnn",
    "options": {"width": 8, "size": 16, "hidden": 32, "dropout": 0.1},
}
BATCHNORM: Tree = {"name": "preactresnet18", "options": {"width": 4, "blocks": [1]}}
KINDS: dict[str, Tree] = {
    "BatchNorm, EMA, collapse": {"model": BATCHNORM, "ema": 0.7},
    "accumulation, bf16, AdamW": {
        "model": SMALL,
        "optimizer": {"name": "adamw", "lr": 0.02, "accumulate": 2},
        "data": {"crop": 1, "flip": True},
        "precision": "bf16",
        "ema": 0,
    },
    "EMA, bf16, collapse": {
        "model": SMALL,
        "optimizer": {"name": "adamw", "lr": 0.02},
        "precision": "bf16",
        "ema": 0.7,
    },
}
# Often, at each epoch's end, or hardly ever: settings that may differ when a run goes on.
PACES = [(0, 0), (0, 0), (0, 0), (1e6, 0), (1e6, 0), (1e6, 1e6)]
WRITES = ("open", "write", "save_file", "mkdir", "fsync", "rename", "unlink", "rmdir", "truncate")
PLACES = ("step", "epoch's end", "evaluation", "rollback", "save", "resume", "finish")


class Scenario:
    """One method with one set of settings, and how its run ends."""

    def __init__(self, method: str, kind: str, data: Path) -> None:
        self.method, self.kind = method, kind
        tree = overlay(overlay(BASE, KINDS[kind]), {"data": {"path": str(data)}})
        own = METHODS[method]
        if method == "free":  # steps on every batch
            tree["optimizer"]["accumulate"] = 1
            self.kind = kind.removeprefix("accumulation, ")
        if method == "pmp":  # takes a sequence of layers
            tree = overlay(tree, {"optimizer": {"name": "adamw", "lr": 0.02}}) | {"model": SMALL}
            self.kind = kind.removeprefix("BatchNorm, ")
        self.tree = overlay({k: v for k, v in tree.items() if k != "method"}, {"method": own})
        self.collapses = "collapse" in kind
        self.expected: dict[str, Any] = {}

    def train(self, out: Path, pace: tuple[float, float] = (0, 0), beside: bool = False) -> None:
        """As `yopo train --resume`. beside: checkpoints are written while training goes on."""
        if beside:
            writing.LARGE = 0
        saves = {"checkpoint": {"minutes": pace[0], "pause": pace[1]}}
        config = validate(overlay(self.tree, saves))
        if self.collapses:
            _break_once()
        with lost_others_are_named():
            train_run(config, out, resume=True, device="cpu")


def main() -> None:
    """Kill until there are enough; write what was found."""
    args = _options()
    torch.set_num_threads(1)
    rng, began = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        data = write_data(Path(folder) / "data.npz")
        wanted = args.only.split(",") if args.only else [*METHODS]
        scenarios = [Scenario(m, kind, data) for m in wanted for kind in KINDS]
        for number, scenario in enumerate(scenarios):
            out = Path(folder) / f"whole-{number}"
            status = forked(lambda s=scenario, out=out: s.train(out), None)  # type: ignore[misc]
            if status.code != 0:
                what = f"{scenario.method}, {scenario.kind}"
                sys.exit(f"\nthe unkilled run of {what}, failed: {status.words}")
            scenario.expected = outcome(out)
            losses = [line["loss"] for line in scenario.expected["lines"]]
            if not losses[-1] < losses[0] - 0.05:  # in a dead network nothing could differ
                sys.exit(f"\n{scenario.method}, {scenario.kind}, learns nothing: {losses}")
            _say(f"unkilled runs: {number + 1} of {len(scenarios)}")
        before = _cpu()
        kills: list[dict[str, Any]] = []
        runs: list[dict[str, Any]] = []
        while len(kills) < args.kills:
            scenario = scenarios[len(runs) % len(scenarios)]
            out = Path(folder) / f"run-{len(runs)}"
            most = min(rng.randint(12, 40), args.kills - len(kills))
            found = kill_and_resume(scenario, out, most, rng)
            kills += found
            wrong = differences(outcome(out), scenario.expected)
            runs.append(_about(scenario) | {"kills": len(found), "differences": wrong})
            bad = sum(bool(run["differences"]) for run in runs)
            _say(f"{len(kills)} of {args.kills} kills, {len(runs)} runs, {bad} differ")
            for line in wrong:
                print(f"\n{scenario.method}, {scenario.kind}: {line}", file=sys.stderr)
            if wrong and args.keep:
                out.rename(args.keep / out.name)
        spent = (_cpu() - before) / len(kills)
    print(file=sys.stderr)
    record = summary(args, kills, runs) | {
        "cpu_seconds_a_kill": round(spent, 2),
        "wall_seconds": round(time.monotonic() - began),
    }
    text = words(record)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "kills.json").write_text(json.dumps(record, indent=1) + "\n")
        (args.out / "kills.jsonl").write_text("".join(json.dumps(k) + "\n" for k in kills))
        (args.out / "README.md").write_text(text)
    print(text)
    sys.exit(1 if record["runs_that_differ"] else 0)


def kill_and_resume(
    scenario: Scenario, out: Path, most: int, rng: random.Random
) -> list[dict[str, Any]]:
    """One run, killed at most so many times, to its end; where each kill landed."""
    found: list[dict[str, Any]] = []
    while True:
        pace, beside = rng.choice(PACES), rng.random() < 0.5
        how, count = "nothing", 0
        if len(found) < most:
            how = rng.choice(["write", "write", "write", "time", "time", "place"])
            count = rng.randint(1, 6) if how == "place" else rng.randint(1, 20 if pace[0] else 80)
        place = rng.choice(PLACES) if how == "place" else ""
        cut = rng.random()

        def child(say: Callable[[str], None], how: str = how, count: int = count) -> None:
            if how == "write":
                _die_at_write(count, cut, say, out)  # noqa: B023
            elif how == "place":
                _die_at_place(place, count, say)  # noqa: B023
            scenario.train(out, pace, beside)  # noqa: B023

        seconds = rng.uniform(0.05, 0.9) if how == "time" else None
        there = _half_written(out)
        status = forked_with_words(child, seconds)
        if status.code == 0:
            return found
        if status.code != -signal.SIGKILL:
            sys.exit(
                f"\n{scenario.method}, {scenario.kind}: ended with {status.code}: {status.words}"
            )
        about = _about(scenario) | {"how": how, "where": status.words or "at a random time"}
        about["beside"] = beside
        if how == "time" and _half_written(out) - there:
            about["where"] = "at a random time, in a write"
        found.append(about)


def _half_written(out: Path) -> set[tuple[str, int]]:
    """Files that are not yet what they will be called; a later kill leaves others."""
    return {(str(path), path.stat().st_mtime_ns) for path in out.rglob(".*writing")}


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves, apart from times: each thing as one that can be compared."""
    lines, torn = seals.read_lines(out / "metrics.jsonl")
    result = seals.read_json(out / "result.json")
    saved = state.load(state.saved(out / "state")[0])
    found: dict[str, Any] = {
        "torn": torn,
        "lines": [{k: v for k, v in line.items() if "seconds" not in k} for line in lines],
        "result": {k: v for k, v in result.items() if "seconds" not in k and k != "environment"},
    }
    sets = {"state": saved.tensors, "best in state": saved.best}
    sets |= {name: tensor_files.load_weights(out / name) for name in (BEST, LAST)}
    for name, tensors in sets.items():
        found |= {f"{name} {k}": tensors_digest({k: v}, {}) for k, v in (tensors or {}).items()}
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not the same, in words."""
    wrong = [f"{k} differs" for k in expected if k != "lines" and found.get(k) != expected[k]]
    wrong += [f"{k} is too much" for k in found.keys() - expected.keys()]
    if found["lines"] != expected["lines"]:
        epochs = [[line["epoch"] for line in one["lines"]] for one in (found, expected)]
        wrong.append(f"metrics differ: epochs {epochs[0]}, expected {epochs[1]}")
    return wrong


# ---------------------------------------------------------------- in the process that is killed


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break_once() -> None:
    """In the third epoch of a run that never went back, a weight becomes NaN."""
    real = Trainer._step

    def step(self: Trainer, x: Tensor, y: Tensor, number: int) -> Step:
        found = real(self, x, y, number)
        p = self.progress
        if (p.epoch, p.rollbacks, number) == (2, 0, len(self.loader) - 1):
            weight = part(next(self.learner.model.parameters()).data)  # FSDP2 may give it none
            weight.view(-1)[:1] = float("nan")
        return found

    Trainer._step = step  # type: ignore[method-assign]


def _die_at_place(place: str, count: int, say: Callable[[str], None]) -> None:
    """At the count-th time (at most: it may come less often) that the trainer gets there."""
    places: dict[str, tuple[Any, str]] = {
        "step": (Trainer, "_step"),
        "epoch's end": (EpochEnd, "finish"),
        "evaluation": (EpochEnd, "evaluate"),
        "rollback": (Keeper, "recover"),
        "save": (Keeper, "save"),
        "resume": (Trainer, "resume"),
        "finish": (Trainer, "_finish"),
    }
    once = place in ("rollback", "resume", "finish")
    left = 1 if once else count
    where, name = places[place]
    real: Any = getattr(where, name)

    def counted(self: object, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        nonlocal left
        left -= 1
        after = count % 2 == 0
        found = real(self, *args, **options) if after else None
        if left == 0:
            say(f"{'after' if after else 'before'} {place}")
            _die()
        return found if after else real(self, *args, **options)

    setattr(where, name, counted)


def _die_at_write(count: int, cut: float, say: Callable[[str], None], out: Path) -> None:
    """At the count-th call that changes a file, after `cut` of what it writes."""
    left = count

    def now(what: str, path: object) -> bool:
        nonlocal left
        if isinstance(path, int):  # a file that is open
            path = os.readlink(f"/proc/self/fd/{path}")
        try:
            inside = Path(os.fsdecode(path)).resolve()  # type: ignore[arg-type]
            name = str(inside.relative_to(out.resolve()))
        except (ValueError, TypeError):
            name = os.fsdecode(path) if isinstance(path, str | Path) else "?"
            if os.path.isabs(name):
                return False
        left -= 1
        if left == 0:
            say(f"{what} {_kind(name)}")
        return left == 0

    def before(what: str, real: Any) -> Any:  # noqa: ANN401
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if now(what, path):
                if cut > 0.5 and what != "fsync":  # after it
                    real(path, *args, **kwargs)
                _die()
            return real(path, *args, **kwargs)

        return called

    for name in ("fsync", "mkdir", "unlink", "rmdir", "rename", "replace", "truncate"):
        what = "rename" if name == "replace" else name
        setattr(os, name, before(what, getattr(os, name)))

    class File:
        """A text file whose writes count."""

        def __init__(self, file: Any, path: object) -> None:  # noqa: ANN401
            self.file, self.path = file, path

        def write(self, text: Any) -> int:  # noqa: ANN401
            if now("write", self.path):
                self.file.write(text[: int(cut * len(text))])
                self.file.flush()
                _die()
            return int(self.file.write(text))

        def __enter__(self) -> "File":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            return getattr(self.file, name)

    opened = io.open

    def open_counted(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        file = opened(path, mode, *args, **kwargs)
        if not set(mode) & set("wax+") or isinstance(path, int):
            return file
        if now("open", path):
            _die()
        return File(file, path)

    io.open = builtins.open = open_counted  # type: ignore[assignment]
    save_file = tensor_files.save_file  # type: ignore[attr-defined]

    def save_counted(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        dies = now("save_file", path)
        save_file(tensors, path, *args, **kwargs)
        if dies:
            size = os.stat(path).st_size
            with opened(path, "r+b") as file:
                file.truncate(int(cut * size))
            _die()

    tensor_files.save_file = save_counted  # type: ignore[attr-defined, assignment]


def _kind(name: str) -> str:
    """A file's name without numbers."""
    parts = ["save-N" if part.startswith("save-") else part for part in Path(name).parts]
    return "/".join(parts) or "the run's folder"


# ---------------------------------------------------------------- processes


class Ended:
    """How a process ended, and what it said last."""

    def __init__(self, code: int, words: str) -> None:
        self.code, self.words = code, words


def forked(work: Callable[[], None], seconds: float | None) -> Ended:
    """Run `work` in a process forked from this one; kill it after so many seconds."""
    return forked_with_words(lambda _: work(), seconds)


def forked_with_words(
    work: Callable[[Callable[[str], None]], None], seconds: float | None
) -> Ended:
    """The same; `work` gets a function that tells this process something."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(here)
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            work(lambda text: _tell(there, text))
            code = 0
        except BaseException as error:
            _tell(there, f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    os.close(there)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
    with open(here, "rb") as pipe:
        words = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return Ended(os.waitstatus_to_exitcode(status), words)


def _tell(handle: int, text: str) -> None:
    os.write(handle, text[:4000].encode())


def write_data(path: Path) -> Path:
    """Four noisy patterns of 16 x 16 pixels, so clear that four epochs teach them."""
    g = np.random.default_rng(0)
    blocks = np.kron(g.integers(0, 2, (4, 1, 4, 4)), np.ones((1, 1, 4, 4), int))
    patterns, arrays = 200 * blocks, dict[str, Any]()
    for name, count in (("train", 120), ("test", 20)):
        y = np.arange(count) % 4
        noise = g.integers(0, 56, (count, 1, 16, 16))
        arrays |= {f"x_{name}": (patterns[y] + noise).astype(np.uint8), f"y_{name}": y}
    np.savez(path, **arrays)
    return path


# ---------------------------------------------------------------- what is written


def summary(
    args: argparse.Namespace, kills: list[dict[str, Any]], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """The counts."""
    inside = [k for k in kills if in_a_write(k)]
    root = Path(__file__).parents[1]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "kills": len(kills),
        "inside_a_write": len(inside),
        "beside": sum(k["beside"] for k in kills),
        "inside_a_write_beside": sum(k["beside"] for k in inside),
        "runs": len(runs),
        "runs_that_differ": sum(bool(run["differences"]) for run in runs),
        "differences": [run for run in runs if run["differences"]],
        "by_method": dict(Counter(k["method"] for k in kills)),
        "by_kind": dict(Counter(k["kind"] for k in kills)),
        "by_call": dict(Counter(k["where"].split()[0] for k in inside if k["how"] == "write")),
        "by_place": dict(Counter(k["where"] for k in kills).most_common()),
        "seed": args.seed,
        "command": f"python -m tools.kills --kills {args.kills} --seed {args.seed}"
        + (f" --only {args.only}" if args.only else ""),
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def in_a_write(kill: dict[str, Any]) -> bool:
    """Whether a file was being changed when the process died."""
    return kill["how"] == "write" or str(kill["where"]).endswith("in a write")


def words(record: dict[str, Any]) -> str:
    """The record on a page."""
    rows = [f"| {place} | {count} |" for place, count in record["by_place"].items()]
    methods = ", ".join(f"{name} {count}" for name, count in record["by_method"].items())
    kinds = "; ".join(f"{name}: {count}" for name, count in record["by_kind"].items())
    text = (
        f"# {record['kills']:,} kills\n\n"
        f"`{record['command']}`: {record['runs']} runs were killed with SIGKILL "
        f"{record['kills']:,} times, {record['inside_a_write']} of them inside a write, and "
        f"resumed until they ended. {record['runs_that_differ']} of them differ from the run that "
        "nobody killed, in any bit of the best or last weights, of the state with the optimizer's, "
        "in a line of the metrics or in the result, apart from times.\n\n"
        f"In {record['beside']} of the killed starts checkpoints were written while training went "
        f"on; {record['inside_a_write_beside']} of these died inside a write.\n\n"
        f"By method: {methods}. By settings: {kinds}.\n\n"
        f"Commit {record['commit']}, Python {record['python']}, torch {record['torch']}, "
        f"{record['machine']}, one thread; {record['cpu_seconds_a_kill']} s of CPU time a kill, "
        f"{record['wall_seconds']} s in all. Each kill is a line of `kills.jsonl`.\n\n"
        "| where the process died | kills |\n|---|---|\n" + "\n".join(rows) + "\n"
    )
    fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill, text.split("\n")))


def _about(scenario: Scenario) -> dict[str, Any]:
    return {"method": scenario.method, "kind": scenario.kind}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _say(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    first, _, examples = (__doc__ or "").partition("examples:")
    parser = argparse.ArgumentParser(
        prog="python -m tools.kills",
        description=first,
        epilog="examples:" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--out", type=Path, help="folder for the record, as records/kills-cpu")
    parser.add_argument("--only", help=f"methods, of {', '.join(METHODS)}")
    parser.add_argument("--keep", type=Path, help="an existing folder for runs that differ")
    return parser.parse_args()


yopo.runs.trainer.CHECK_EVERY = 1  # a look at every step, so that a checkpoint may follow it

if __name__ == "__main__":
    main()
