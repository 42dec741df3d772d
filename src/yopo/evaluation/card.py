"""The card: what was attacked, with what, at which commit, how long, and what to doubt."""

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from yopo.attacks.autoattack import LEAST_CLASSES
from yopo.attacks.names import STANDARD, Attack
from yopo.attacks.steps import step_size
from yopo.core.files import read_text
from yopo.core.threat import Threat
from yopo.core.words import fraction

UNATTACKED = "no attack was run; --attacks clean,pgd-20 attacks it"


def card(result: Mapping[str, Any]) -> str:
    """Markdown from the values of `Result.to_dict`."""
    worst, about = result["worst"], {k: one_line(v) for k, v in result["about"].items()}
    lines = [
        f"### Robustness of {about['model']}",
        "",
        f"{about['images']:,} images: {about['data']}. Threat: {about['threat']}.",
        "",
        "| attack | accuracy (95% interval) | settings | propagations¹ | time |",
        "|---|---|---|---|---|",
    ]
    for name, a in result["attacks"].items():
        cells = [one_line(name), percent(a["accuracy"], a["interval"]), one_line(how(a))]
        cells += [f"{a['propagations']:.1f}", duration(a["seconds"])]
        lines.append(f"| {' | '.join(cells)} |")
    if attacked(result["attacks"]):
        share = percent(worst["accuracy"], worst["interval"])
        lines += [f"| **worst case, per image** | **{share}** | | | |", ""]
    else:
        lines += ["", f"**{UNATTACKED[0].upper()}{UNATTACKED[1:]}.**", ""]
    doubts = [{k: one_line(v) for k, v in warning.items()} for warning in result["warnings"]]
    warnings = [f"**Warning ({w['code']})**: {w['text']}" for w in doubts]
    lines += warnings or ["No warnings from the automatic checks."]
    lines += [
        "",
        f"Weights {about['weights']} (sha256 of its tensors {about['weights_sha256'][:16]}…). "
        + circumstances(about),
        "",
        "¹ Full forward and backward passes for each image; what is broken is not attacked again.",
    ]
    return "\n".join(lines) + "\n"


def attacked(names: Iterable[str]) -> bool:
    """Whether any of these is more than a look at the images as they are: a worst case needs it."""
    return bool({*names} - {"clean"})


def how(attack: Mapping[str, Any]) -> str:
    """An attack's settings, with what was left after each of its stages."""
    stages = ", ".join(f"{s} {100 * share:.2f}%" for s, share in attack.get("after", {}).items())
    return f"{attack['settings']} (after {stages})" if stages else str(attack["settings"])


def circumstances(about: Mapping[str, Any]) -> str:
    """Precision, seed, versions, hardware and date."""
    return (
        f"{about['precision']}, seed {about['seed']}, batches of {about['batch']}. "
        f"{about['packages']}, commit {about.get('commit') or 'unknown'}. {about['hardware']}. "
        f"{about['finished']}."
    )


def one_line(value: Any) -> Any:  # noqa: ANN401
    """A name on one line in which Markdown and HTML see no more than letters; others as it is."""
    if not isinstance(value, str):
        return value
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+", " ", value)
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", line)


def percent(share: float, interval: Sequence[float]) -> str:
    """ "47.20% (46.2–48.2)" """
    return f"{100 * share:.2f}% ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})"


def duration(seconds: float) -> str:
    """ "12.3 s", "4.5 min" or "2.1 h" """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def settings(attack: Attack, threat: Threat, step: float | None) -> str:
    """What an attack's name stands for, in words."""
    if attack.kind == "pgd":
        size = step_size(threat, attack.steps) if step is None else step
        starts = "1 random start" if attack.restarts == 1 else f"{attack.restarts} random starts"
        return f"{attack.steps} steps of {size:.3g}, {starts}, {attack.loss} loss"
    if attack.kind == "cw":
        return f"{attack.steps} Adam steps, rate 0.01, c = 500"
    if attack.kind == "autoattack":
        if len(attack.stages) == 1:
            return "as in the standard version"
        lacking = [stage for stage in STANDARD if stage not in attack.stages]
        needs = (f"{stage}, which needs {LEAST_CLASSES[stage]} classes" for stage in lacking)
        return " without ".join(["standard version", *needs])
    if attack.own is not None:
        return f"the caller's own, of {getattr(attack.own, '__module__', 'unknown')}"
    return ""


def norm(threat: Threat) -> str:
    """The threat in words, eps as a fraction of 255 where it is one."""
    name = type(threat).__name__
    return f"{'L∞' if name == 'Linf' else name}, eps = {fraction(threat.eps)}"


def provenance(model: nn.Module, device: torch.device, attacks: Sequence[Attack]) -> dict[str, Any]:
    """Where, when and with what: what the caller need not say."""
    modules = {"yopo-torch": "yopo", "torch": "torch"}
    if any(a.kind == "autoattack" for a in attacks):
        modules["pyautoattack"] = "pyautoattack"
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "model": f"{type(model).__name__} ({parameters:,} parameters)",
        "packages": ", ".join(f"{k} {import_module(v).__version__}" for k, v in modules.items()),
        "commit": _commit(),
        "hardware": hardware(device),
        "finished": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def hardware(device: torch.device) -> str:
    """The GPU's name, or the processor and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def _commit() -> str | None:
    """The commit of the working directory, as git's own files name it.

    git itself is not asked: it runs what the folder's settings name (core.fsmonitor, filters, …).
    So whether files have changed since is not known.
    """
    here = Path.cwd()
    try:
        git = next(p for folder in (here, *here.parents) if (p := folder / ".git").exists())
        if git.is_file():  # of a worktree or a submodule
            git = git.parent / _line(git).removeprefix("gitdir: ")
        if (head := _line(git / "HEAD")).startswith("ref: "):
            head = _ref(git, head.removeprefix("ref: "))
    except (OSError, ValueError, StopIteration):
        return None
    return head[:12] if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", head) else None


def _ref(git: Path, name: str) -> str:
    """The commit of a branch: a file of its own, or a line of packed-refs."""
    common = git / _line(git / "commondir") if (git / "commondir").is_file() else git
    if re.fullmatch(r"refs(/[\w+@-][\w.+@-]*)+", name) and (common / name).is_file():
        return _line(common / name)
    lines = (line.split(" ") for line in read_text(common / "packed-refs").splitlines())
    return next(words[0] for words in lines if words[1:] == [name])


def _line(path: Path) -> str:
    """The one line of a small file."""
    return read_text(path, 4096).strip()
