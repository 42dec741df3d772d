"""The names of attacks: `pgd-20`, `pgd-50-10`, `cw-linf`, `autoattack`, …"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")  # AutoAttack's stages, in its order
EXAMPLES = ("clean", "pgd-20", "pgd-50-10", "cw", "cw-linf", *STANDARD, "autoattack")
MARGIN_STEPS = 50  # of cw-linf, unless its name says otherwise


@dataclass(frozen=True, slots=True)
class Attack:
    """What a name stands for; two names of one attack are equal but for `name`."""

    name: str
    kind: Literal["clean", "pgd", "cw", "autoattack"]
    steps: int = 0
    restarts: int = 1
    loss: Literal["cross-entropy", "margin"] = "cross-entropy"
    stages: tuple[str, ...] = ()  # of the AutoAttack package


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
    near = difflib.get_close_matches(name, EXAMPLES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"no attack {name!r}; {hint}attacks are written like {', '.join(EXAMPLES)}")


def parse_all(names: str | Sequence[str]) -> list[Attack]:
    """A list of names, or one string with commas; each attack once, at least one."""
    words = names.split(",") if isinstance(names, str) else list(names)
    words = [word.strip() for word in words]
    if not any(words):
        raise ValueError(f"expected at least one attack, got none; there are {', '.join(EXAMPLES)}")
    attacks = [parse(word) for word in words]
    seen: dict[tuple[object, ...], str] = {}
    for a in attacks:
        what = (a.kind, a.steps, a.restarts, a.loss, a.stages)
        if what in seen:
            raise ValueError(
                f"expected each attack once, got {seen[what]} and {a.name}; leave one out"
            )
        seen[what] = a.name
    return attacks


def _counts(name: str, match: re.Match[str]) -> tuple[int, int]:
    steps, restarts = int(match[1] or MARGIN_STEPS), int(match[2] or 1)
    if steps < 1 or restarts < 1:
        raise ValueError(f"expected at least 1 step and 1 restart, got {name!r}; as in pgd-20-1")
    return steps, restarts
