"""Let every reader meet many damaged files: `python -m tools.fuzz --inputs 20000 --seed 1`.

Writes counts by reader, the longest time and the highest memory growth, and every input that gave
a traceback, a hang or too much memory (there should be none).
"""

import argparse
import faulthandler
import json
import os
import platform
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import PIL
import pydantic
import safetensors
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzzing import GROWTH, SECONDS, Damage, Hang, Reader, attempt, little_memory, readers


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one reader")
    parser.add_argument("--out", type=Path, help="folder for fuzz.json and the inputs that failed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    failures: list[dict[str, str]] = []
    began = time.perf_counter()
    fast = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as room:
        found = readers(Path(room), heavy=True)
        found = {k: r for k, r in found.items() if args.only in (None, k)}
        share = -(-args.inputs // len(found))
        for name, reader in found.items():
            rows[name] = _run(name, reader, share, args.seed, failures, Path(room))
            print(f"{name:18}", *(f"{k} {v}" for k, v in rows[name].items()), flush=True)
    total = {
        key: sum(row[key] for row in rows.values())
        for key in ("inputs", "accepted", "refused", "failed")
    }
    about = {
        "seed": args.seed,
        "limits": {"seconds": SECONDS, "bytes": GROWTH},
        "seconds": round(time.perf_counter() - began),
        "python": platform.python_version(),
        "packages": {
            m.__name__: m.__version__
            for m in (torch, np, PIL, pydantic, safetensors, yaml, hypothesis)
        },
    }
    tree = {"total": total, "readers": rows, "failures": failures, "about": about}
    print(json.dumps(total))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "fuzz.json").write_text(json.dumps(tree, indent=1) + "\n")
    if failures:
        raise SystemExit(f"{len(failures)} failed, first: {failures[0]['what']}")


def _run(
    name: str, reader: Reader, many: int, base: int, failures: list[dict[str, str]], room: Path
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    longest, growth, seen = 0.0, 0, set[str]()

    def meet(damage: Damage) -> None:
        nonlocal longest, growth
        if counts["inputs"] >= many:
            return
        counts["inputs"] += 1
        faulthandler.dump_traceback_later(60, exit=True)  # C code takes no alarm
        try:
            with little_memory(4 << 30):
                found = attempt(reader, damage)
        except (Exception, Hang) as error:
            counts["failed"] += 1
            last = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
            what = f"{type(error).__name__}: {str(error)[:300]}"
            where = f"{Path(last.filename).name}:{last.lineno}"
            if f"{type(error).__name__} {where}" not in seen:
                seen.add(f"{type(error).__name__} {where}")
                text = traceback.format_exc().replace(str(room), "ROOM")
                item = {"reader": name, "what": what, "where": where, "input": repr(damage)[:3000]}
                failures.append(item)
                print(f"--- {name}\n{item['input'][:1500]}\n{text}", flush=True)
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        counts["refused" if found.refused else "accepted"] += 1
        longest, growth = max(longest, found.seconds), max(growth, found.growth)

    round_ = 0
    while counts["inputs"] < many and round_ < 50:
        round_ += 1
        test = given(reader.inputs)(meet)
        test = settings(
            max_examples=many,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(test)
        seed(base * 1000 + round_)(test)()
    return {
        **{k: counts[k] for k in ("inputs", "accepted", "refused", "failed")},
        "longest_seconds": round(longest, 3),
        "growth_megabytes": growth >> 20,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
