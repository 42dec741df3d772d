"""Which runs belong together: seeds of one setting, and those whose times may be compared."""

import re
from collections.abc import Sequence
from dataclasses import replace

from yopo.methods.registry import ENTRIES, Entry
from yopo.report.records import Run


def seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """Finished runs that differ in nothing but their seed, together; others by themselves."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = run.trained_with if run.result else f"{run.trained_with} {run.folder}"
        groups.setdefault(key, []).append(run)
    alike = []
    for group in groups.values():
        distinct = len({run.config.get("seed") for run in group}) == len(group)
        alike += [group] if distinct else [[run] for run in group]
    return alike


def called(group: Sequence[Run], of: str = "") -> str:
    """Seeds of one setting, by what their folders' names have in common: "PGD-10 (2 seeds)"."""
    first, count = group[0], len(group)
    if count == 1:
        return first.label
    names = {re.sub(r"[-_. /]*seed[-_. ]*\d+", "", run.name) for run in group}
    label = replace(first, name=names.pop()).label if len(names) == 1 else first.method
    start = f"{label[:-1]}, " if label.endswith(")") else f"{label} ("
    return f"{start}{of}{count} seeds)"


def timed(runs: Sequence[Run]) -> list[Run]:
    """Those that are finished and had the GPU for themselves."""
    return [r for r in runs if r.result and not r.shared]


def same_hardware(runs: Sequence[Run]) -> bool:
    """Whether times may be compared, as far as the runs say where they were trained."""
    return len({h for r in runs if (h := r.environment.get("hardware"))}) <= 1


def baseline(run: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs whose time this one's is measured against: its rival's, of the most steps.

    Of several such trainings, the seeds of the longest.
    """
    entry = ENTRIES.get(run.config["method"]["name"])  # none of what is its owner's
    rival = entry.rival if entry else Entry.rival
    if not rival:
        return []
    same = [r for r in timed(runs) if _task(r) == _task(run) and r.short == run.short]
    rivals = [r for r in same if r.config["method"]["name"] == rival]
    steps = {r: r.config["method"].get("steps") or 0 for r in rivals}
    most = max(steps.values(), default=0)
    longest = seeds([r for r in rivals if steps[r] == most])
    return max(longest, key=lambda group: group[0].config["epochs"], default=[])


def _task(run: Run) -> list[str]:
    """The data and the network, for times of the same work."""
    keys = {"data": ("name", "path", "root", "size"), "model": ("name", "options")}
    return [str(run.config[part].get(key)) for part, names in keys.items() for key in names]
