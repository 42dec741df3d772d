"""What `yopo` does with hostile run folders and weights files, those of `tools.hostile_cases`.

Usage: python -m tools.hostile [--json records/hostile-cpu/hostile.json] [--only NAME]
Every command that reads a run folder meets every case in a process of its own. Counted are the
commands started, modules of the case imported, attempts at the network, files changed outside of
the case, files of the user's that were sent (`leaked`), trackers' runs that a file named
(`misled`), tracebacks, control characters on the terminal, and what takes more than 20 s of the
processor.
"""

import argparse
import importlib
import io
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console

import yopo
from tools.hostile_cases import EVIL, GROUPS, PACKAGES, Touch, run
from yopo import __version__, cli
from yopo.cli.common import clean
from yopo.core import files

SLOW, MEMORY = 20, 2 << 30  # seconds and bytes that a case may take
MINE = "mine, and nobody else's"
SENT = {"README.md", "config.yaml", "model.safetensors", "eval.json"}
BAD = (
    *("commands", "network", "changed", "leaked", "misled"),
    *("tracebacks", "steering", "hangs", "killed", "memory"),
)


def commands(case: Path, given: Path) -> dict[str, list[str]]:
    """All that read a run folder, or a weights file."""
    image = case / "image.png"
    Image.new("L", (28, 28), 99).save(image)
    few = ["--attacks", "pgd-1", "--samples", "4"]
    if given.suffix == ".pt":
        ours = "--model.name smallcnn --model.options.width=2 --model.options.hidden=4".split()
        theirs = "--model.name preactresnet18".split()
        weights = ["--weights", str(given), *few]
        return {"eval": ["eval", *ours, *weights], "eval, deeper": ["eval", *theirs, *weights]}
    found = {
        "eval": ["eval", str(given), *few, "--save-examples"],
        "eval, tracked": ["eval", str(given), *few, "--track", "wandb"],
        "predict": ["predict", str(given), str(image)],
        "export": ["export", str(given), "--to", "pt2", "--overwrite"],
        "push": ["push", str(given), "a/b", "--unevaluated"],
        "robustbench": [
            *("robustbench", str(given), "--name", "A2026B"),
            *"--title t --authors a --venue v --link l".split(),
        ],
    }
    if given.suffix in (".safetensors", ".st"):
        return found
    (case / "both").mkdir(exist_ok=True)
    (case / "both" / "yopo-5-3").symlink_to(given)
    tiny = "--epochs 1 --data.held_out 4 --model.options.width 2 --evaluate.images 4 --batch 1000"
    resumed = ["--out", str(given), "--resume", *tiny.split()]
    return found | {
        "diagnose": ["diagnose", str(given), "--images", "4", "--m", "1"],
        "ls": ["ls", str(given), str(given.parent)],
        "report": ["report", str(given), "--out", "page.html", "--figures", "figures"],
        "reproduce": ["reproduce", "table2", "--show", "--out", str(given.parent)],
        "compare": [
            *("compare", "demo", "--methods", "yopo-5-3", "--out", str(case / "both"), "--resume"),
            *tiny.split(),
        ],
        **({"train": ["train", "demo", *resumed]} if (given / "state").is_dir() else {}),
    }


def meet(case: Path, words: list[str]) -> Counter[str]:
    """Run one command in a process of its own, in the case's folder; what happened."""
    noted = case / "noted"
    noted.unlink(missing_ok=True)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(case, words, noted)
    limit, pid = started + 12 * SLOW, 0  # a busy machine gives it little of its time
    while not pid and time.monotonic() < limit:
        pid, status, used = os.wait4(child, os.WNOHANG)
        time.sleep(0.01)
    found: Counter[str] = Counter()
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        found["hangs"] += 1
    said = (case / "said").read_text(errors="surrogateescape")
    for line in noted.read_text().splitlines() if noted.exists() else ():
        found[line.partition(" ")[0]] += 1
    found["tracebacks"] += "Traceback (most recent call last)" in said
    found["hangs"] += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    found["killed"] += os.WIFSIGNALED(status) and not found["hangs"]
    found["steering"] += clean(said) != said
    found["commands"] += (case / "ran").exists()
    found["memory"] += 1024 * used.ru_maxrss > _own_memory() + MEMORY
    victim = case / "victim" / "file"
    found["changed"] += not (victim.is_file() and victim.read_text() == MINE)
    found["changed"] += len(list((case / "victim").iterdir())) != 1
    sent = [file for file in (case / "sent").rglob("*") if file.is_file()]
    found["leaked"] += any(file.name not in SENT or _tells(file, case) for file in sent)
    found["misled"] += (case / "misled").exists()
    shutil.rmtree(case / "sent", ignore_errors=True)
    (case / "misled").unlink(missing_ok=True)
    found["done"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    found["refused"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2
    found["slowest"] = round(1000 * (used.ru_utime + used.ru_stime))
    return +found


def _tells(file: Path, case: Path) -> bool:
    """Whether it has what is the user's own: a file's content, or where things are."""
    content = file.read_bytes()
    return MINE.encode() in content or os.fsencode(case.parent) in content


def _own_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _child(case: Path, words: list[str], noted: Path) -> None:
    """The command, watched; never returns."""
    status = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (SLOW, SLOW + 5))
        os.chdir(case)
        said = os.open(case / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        log = os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), "utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), "utf-8", write_through=True)
        sys.path.insert(0, str(case.parent / "site"))
        sys.argv = ["yopo", *words]
        sys.addaudithook(lambda event, args: _note(log, case, event, args))
        cli.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _note(log: int, case: Path, event: str, args: tuple[Any, ...]) -> None:
    """Write down what only a hostile file would make us do."""
    started = (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "subprocess.Popen",
        "pty.spawn",
    )
    network = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request")
    if event in started or (event == "import" and str(args[1] or "").startswith(str(case))):
        os.write(log, f"commands {event} {str(args)[:200]!r}\n".encode(errors="replace"))
    elif event in network:
        os.write(log, f"network {event} {str(args)[:200]!r}\n".encode(errors="replace"))


def _empty(case: Path) -> Path:
    """What lies around every run."""
    (case / "victim").mkdir(parents=True)
    (case / "victim" / "file").write_text(MINE)
    (case / "evil.py").write_text(EVIL)
    torch.save(Touch(), case / "evil.pt")
    os.mkfifo(case / "pipe")
    return case


def _load() -> None:
    """All that the commands import, before there are cases: else each process would do it anew."""
    for module in pkgutil.walk_packages(yopo.__path__, "yopo."):
        with suppress(ImportError):  # of a package that is not here
            importlib.import_module(module.name)
    for name in ("torch.export", "matplotlib.figure", "matplotlib.backends.backend_svg"):
        with suppress(ImportError):
            importlib.import_module(name)


def _control(case: Path) -> None:
    """What is trusted does run, and is counted: the counts can be other than 0."""
    folder = run(_empty(case), {"name": "os:system", "options": {"command": "touch ran"}})
    found = meet(case, ["eval", str(folder), "--trust"])
    if found["commands"] != 2:  # by its event and by its trace
        raise RuntimeError(f"expected a trusted command to be counted, got {dict(found)}")


def main() -> None:
    """Make the cases, run all commands on each, print and keep the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--only", default="", help="cases with this in their names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    _load()
    cases = [(name, make) for group in GROUPS for name, make in group()]
    if twice := [name for name, many in Counter(name for name, _ in cases).items() if many > 1]:
        raise RuntimeError(f"expected cases of different names, got {twice[0]!r} twice")
    total: Counter[str] = Counter()
    told: dict[str, dict[str, dict[str, int]]] = {}
    slowest = 0
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "site").mkdir()
        for name, text in PACKAGES.items():
            (Path(place) / "site" / f"{name}.py").write_text(text)
        os.environ["HOME"] = place  # where a secret is kept
        _control(Path(place) / "control")
        for i, (name, make) in enumerate(cases):
            if args.only not in name:
                continue
            case = _empty(Path(place) / f"{i:03d}")
            given = make(case)
            for command, line in commands(case, given).items():
                found = meet(case, line)
                slowest = max(slowest, found.pop("slowest", 0))
                total += found
                told.setdefault(name, {})[command] = dict(found)
                bad = {k: v for k, v in found.items() if k not in ("done", "refused")}
                if bad or args.only:
                    print(f"{clean(name)}: {command}: {dict(found)}")
                    print(clean((case / "said").read_text(errors="replace")[-1500:]))
            shutil.rmtree(case)
    counts = {
        "cases": len(told),
        "runs of commands": sum(map(len, told.values())),
        **{kind: total[kind] for kind in (*BAD, "done", "refused")},
        "slowest, s": slowest / 1000,
    }
    Console(highlight=False, markup=False).print(counts)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"yopo": __version__, "torch": torch.__version__}
        tree = {"about": about, "counts": counts, "cases": told}
        files.write_text(args.json, json.dumps(tree, indent=1) + "\n")
    sys.exit(any(total[kind] for kind in BAD))


if __name__ == "__main__":
    main()
