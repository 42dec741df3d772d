"""Copy runs into the records, without weights and checkpoints.

Usage: python tools/keep_runs.py runs/table2 records/reproduction
       python tools/keep_runs.py runs/table2/pgd-10-seed-* records/reproduction/table2
A source is a run folder or a folder of them, and keeps its name. A path of the machine in any of
the files stops it before anything is written.
"""

import argparse
import re
import shutil
from pathlib import Path

KEPT = re.compile(r"config\.yaml|metrics\.jsonl|result\.json|(model.*\.)?eval\.json|table\d\.json")
# /home/me, /data, ~/runs, C:\runs; but neither 8/255, docs/x.md nor https://…
MACHINE = re.compile(r"(?<![\w.:/<])(?:~?/[A-Za-z_][\w.+-]*|[A-Za-z]:\\)")


def keep(sources: list[Path], to: Path) -> list[Path]:
    """Copy what a table or a report is made from; return the files written."""
    plan: dict[Path, Path] = {}
    for source in sources:
        found = [f for f in sorted(source.rglob("*")) if f.is_file() and KEPT.fullmatch(f.name)]
        if not any(file.name == "config.yaml" for file in found):
            raise ValueError(f"expected a run folder, or a folder of them, got {source}")
        plan |= {file: to / source.resolve().name / file.relative_to(source) for file in found}
    for file in plan:
        if path := MACHINE.search(file.read_text()):
            raise ValueError(f"expected no path of a machine, got {path[0]!r} in {file}; remove it")
    for file, target in plan.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return list(plan.values())


def main() -> None:
    """Read the command line, copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SRC")
    parser.add_argument("to", type=Path, metavar="DEST")
    args = parser.parse_args()
    for path in keep(args.sources, args.to):
        print(path)


if __name__ == "__main__":
    main()
