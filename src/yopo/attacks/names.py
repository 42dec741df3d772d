"""The names of attacks: `pgd-20`, `pgd-50-10`, `cw-linf`, `autoattack`, …, and your own."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.threat import Threat

# model, images x (B, ...), labels y (B,), threat, generator -> adversarial images (B, ...)
Own = Callable[[nn.Module, Tensor, Tensor, Threat, torch.Generator], Tensor]
STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")  # AutoAttack's stages, in its order
EXAMPLES = ("clean", "pgd-20", "pgd-50-10", "cw", "cw-linf", *STANDARD, "autoattack")
MARGIN_STEPS = 50  # of cw-linf, unless its name says otherwise


@dataclass(frozen=True, slots=True)
class Attack:
    """What a name stands for; two names of one attack are equal but for `name`."""

    name: str
    kind: Literal["clean", "pgd", "cw", "autoattack", "own"]
    steps: int = 0
    restarts: int = 1
    loss: Literal["cross-entropy", "margin"] = "cross-entropy"
    stages: tuple[str, ...] = ()  # of the AutoAttack package
    own: Own | None = None  # a function of the user's


def parse(name: str) -> Attack:
    """One name; a ValueError with the nearest known ones if it is none."""
    if match := re.fullmatch(r"pgd-(\d+)(?:-(\d+))?", name):
        return Attack(name, "pgd", *_counts(name, match))
    if match := re.fullmatch(r"cw-linf(?:-(\d+))?(?:-(\d+))?", name):
        return Attack(name, "pgd", *_counts(name, match), loss="margin")
    if name == "clean":
        return Attack(name, "clean")
    if name == "cw":
        return Attack(name, "cw", steps=100)
    if name in STANDARD:
        return Attack(name, "autoattack", stages=(name,))
    if name == "autoattack":
        return Attack(name, "autoattack", stages=STANDARD)
    near = _near(name)
    hint = f"did you mean {near}? " if near else ""
    raise ValueError(f"no attack {name!r}; {hint}attacks are written like {', '.join(EXAMPLES)}")


def _near(name: str) -> str | None:
    """The attack that may be meant, with the numbers that were typed."""
    counts = re.compile(r"((?:-\d+){0,2})(?:-\d*)*$")
    ending = counts.search(name)
    typed = ending[1] if ending else ""
    words = {counts.sub("", example): example for example in reversed(EXAMPLES)}
    near = difflib.get_close_matches(counts.sub("", name), words, n=1)
    if not near:
        return None
    return near[0] + typed if typed and near[0] in ("pgd", "cw-linf") else words[near[0]]


def parse_all(attacks: str | Sequence[str | Own]) -> list[Attack]:
    """A list of names and own attacks, or one string with commas; each once, at least one."""
    words = attacks.split(",") if isinstance(attacks, str) else list(attacks)
    words = [word.strip() if isinstance(word, str) else word for word in words]
    if not any(words):
        raise ValueError(f"expected at least one attack, got none; there are {', '.join(EXAMPLES)}")
    chosen = [parse(word) if isinstance(word, str) else _own(word) for word in words]
    seen: dict[tuple[object, ...], str] = {}
    for a in chosen:
        what = (a.kind, a.steps, a.restarts, a.loss, a.stages, a.own and a.name)
        if what in seen:
            raise ValueError(
                f"expected each attack once, got {seen[what]} and {a.name}; leave one out"
            )
        seen[what] = a.name
    return chosen


def _own(function: Own) -> Attack:
    """An attack of the user's, under the name of its function."""
    if not callable(function):
        raise TypeError(
            "expected attacks by name, as pgd-20, or functions of (model, x, y, threat, "
            f"generator), got {function!r}"
        )
    name = getattr(function, "__name__", type(function).__name__)
    if name in EXAMPLES:
        raise ValueError(f"{name} is an attack of ours; give yours another __name__")
    return Attack(name, "own", own=function)


def _counts(name: str, match: re.Match[str]) -> tuple[int, int]:
    steps, restarts = int(match[1] or MARGIN_STEPS), int(match[2] or 1)
    if steps < 1 or restarts < 1:
        raise ValueError(f"expected at least 1 step and 1 restart, got {name!r}; as in pgd-20-1")
    return steps, restarts
