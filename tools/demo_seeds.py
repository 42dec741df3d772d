"""Run what `make demo` runs with several seeds, and keep the runs without their weights.

Usage: python -m tools.demo_seeds --out runs/demo-seeds --records records/demo-seeds-cpu
       python -m tools.demo_seeds --seeds 0 --out runs/demo-times --times times.json
The commands are those of the Makefile. What is finished is not run again, so that it can be broken
off; several of it, each with some `--seeds`, may share the work. --times: the processor time of
each command, all its threads together; others' work on the machine hardly changes it.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

from tools.keep_runs import keep

MAKEFILE = Path(__file__).parent.parent / "Makefile"
HOME = "runs/demo"


def commands(seed: int, out: Path) -> list[list[str]]:
    """The words after `yopo` of the demo's commands, into a folder."""
    text = MAKEFILE.read_text()
    (folders,) = (line[len("DEMO := ") :] for line in text.splitlines() if line[:7] == "DEMO :=")
    recipe = text.partition("\ndemo:")[2].partition("\n\n")[0]
    found = []
    for line in recipe.splitlines()[1:]:
        yopo, *words = shlex.split(line.replace("$(DEMO)", folders))
        if yopo != "$(BIN)/yopo" or not any(HOME in word for word in words):
            raise ValueError(f"expected a command of yopo's on {HOME}, got {line!r} in {MAKEFILE}")
        words = [word.replace(HOME, str(out)) for word in words]
        found.append(words + (["--seed", str(seed)] if words[0] == "compare" else []))
    return found


def processor_seconds() -> float:
    """Of all that this process has run."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    """Read the command line, run, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--records", type=Path, help="where to keep them; else that is left out")
    parser.add_argument("--times", type=Path, help="file for the processor time of each command")
    args = parser.parse_args()
    folders = {seed: args.out / f"seed-{seed}" for seed in args.seeds}
    times: dict[str, float] = {}
    for seed, folder in folders.items():
        done = folder / "done"
        for words in [] if done.exists() else commands(seed, folder):
            print("yopo", *words, flush=True)
            before = processor_seconds()
            subprocess.run([sys.executable, "-m", "yopo", *words], check=True)
            times[words[0]] = times.get(words[0], 0.0) + processor_seconds() - before
        done.touch()
    if args.times:
        # torch's own number where nobody says one: the cores
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        told = {"threads": threads, "processor_seconds": times, "whole": sum(times.values())}
        args.times.write_text(json.dumps(told, indent=1) + "\n")
    if args.records:
        for path in keep(list(folders.values()), args.records):
            print(path)


if __name__ == "__main__":
    main()
