"""Run what `make demo` runs with several seeds, and keep the runs without their weights.

Usage: python -m tools.demo_seeds --out runs/demo-seeds --records records/demo-seeds-cpu
The commands are those of the Makefile. What is finished is not run again, so that it can be broken
off; several of it, each with some `--seeds`, may share the work.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from tools.keep_runs import keep

MAKEFILE = Path(__file__).parent.parent / "Makefile"
HOME = "runs/demo"


def commands(seed: int, out: Path) -> list[list[str]]:
    """The words after `yopo` of the demo's trainings and evaluations, into a folder."""
    text = MAKEFILE.read_text()
    (folders,) = (line[len("DEMO := ") :] for line in text.splitlines() if line[:7] == "DEMO :=")
    recipe = text.partition("\ndemo:")[2].partition("\n\n")[0]
    found = []
    for line in recipe.splitlines()[1:]:
        yopo, *words = shlex.split(line.replace("$(DEMO)", folders))
        if yopo != "$(BIN)/yopo" or not any(HOME in word for word in words):
            raise ValueError(f"expected a command of yopo's on {HOME}, got {line!r} in {MAKEFILE}")
        words = [word.replace(HOME, str(out)) for word in words]
        more = {"compare": ["--seed", str(seed)], "eval": []}.get(words[0])
        if more is not None:
            found.append(words + more)
    return found


def main() -> None:
    """Read the command line, run, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--records", type=Path, help="where to keep them; else that is left out")
    args = parser.parse_args()
    folders = {seed: args.out / f"seed-{seed}" for seed in args.seeds}
    for seed, folder in folders.items():
        done = folder / "done"
        for words in [] if done.exists() else commands(seed, folder):
            print("yopo", *words, flush=True)
            subprocess.run([sys.executable, "-m", "yopo", *words], check=True)
        done.touch()
    if args.records:
        for path in keep(list(folders.values()), args.records):
            print(path)


if __name__ == "__main__":
    main()
