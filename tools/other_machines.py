"""Run the tests as other machines would: other vector units, threads, seeds, and busy cores.

Usage: python -m tools.other_machines                    (the whole suite, eight times)
       python -m tools.other_machines --only generic busy -- tests/runs/test_trainer.py
Two processes run the tests. What follows `--` goes to pytest. Each machine gets one line; what
pytest says of failures is on stderr. There is no path and no name of this machine in the summary.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
OUT = ROOT / "records" / "other-machines-cpu" / "results.json"
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
GENERIC = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


@dataclass(frozen=True)
class Machine:
    """How it differs from this one."""

    environment: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    seed: int = 0
    busy: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """All that is set in the environment of the tests."""
        own = {"OMP_NUM_THREADS": str(self.threads), "YOPO_TEST_SEED": str(self.seed)}
        if self.threads > 1:  # those that spin while they wait take the other process's core
            own["OMP_WAIT_POLICY"] = "passive"
        return self.environment | own


# Each value of each factor comes at least once, and the vector units with both numbers of threads.
MACHINES = {
    "as it is": Machine(),
    "avx2": Machine(AVX2),
    "generic": Machine(GENERIC),
    "avx2, two threads": Machine(AVX2, threads=2),
    "generic, two threads, seed 1": Machine(GENERIC, threads=2, seed=1),
    "mixed, seed 2": Machine(AVX2 | {"ONEDNN_MAX_CPU_ISA": "SSE41"}, seed=2),
    "seed 3": Machine(seed=3),
    "busy": Machine(busy=True),
}


def main() -> None:
    """Run the chosen machines one after the other; fail if a test failed on any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--out", type=Path, default=OUT, help=f"default: {OUT.relative_to(ROOT)}")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options, more = parser.parse_args(words[:at]), words[at + 1 :]
    about: dict[str, Any] = {"python": platform.python_version(), "torch": version()}
    about |= {"commit": commit(), "cores": os.cpu_count(), "pytest": more}
    results: dict[str, Any] = {}
    for name in options.only:
        results[name] = found = run(MACHINES[name], more)
        counts = f"{found['passed']:5} passed {found['failed']:3} failed {found['seconds']:5} s"
        print(f"{name:{max(map(len, MACHINES))}} {counts}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about | {"machines": results}, indent=1) + "\n")
    sys.exit(any(found["failed"] or found["exit"] for found in results.values()))


def run(machine: Machine, more: list[str]) -> dict[str, Any]:
    """The suite on one machine: counts, names of what failed, seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, busy(machine.busy):
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-n", "2", "--dist", "worksteal"]
        # Code compiled for one machine must not serve another.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled")}
        done = subprocess.run(
            [*command, *more],
            cwd=ROOT,
            env=os.environ | machine.variables | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not report.exists():  # pytest itself did not start
            sys.exit(done.stdout)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [name_of(case) for case in cases if has(case, "failure", "error")]
    skipped = sum(has(case, "skipped") for case in cases)
    if failures:
        print(done.stdout, file=sys.stderr)
    return {
        "environment": machine.variables,
        "busy": machine.busy,
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began),
    }


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """A process for each core that does nothing, without a pause."""
    count = (os.cpu_count() or 1) if wanted else 0
    idle = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in idle:
            process.kill()
            process.wait()


def has(case: ElementTree.Element, *kinds: str) -> bool:
    """Whether a test ended in one of these ways."""
    return any(case.find(kind) is not None for kind in kinds)


def name_of(case: ElementTree.Element) -> str:
    """As pytest writes it."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def version() -> str:
    """Of torch, which is not imported for it."""
    from importlib.metadata import version

    return version("torch")


def commit() -> str:
    """The commit that is tested, and whether files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
