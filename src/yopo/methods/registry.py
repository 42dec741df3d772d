"""Every method, declared once: settings, specs, builder, bench and reports read it here.

Names, types, choices and defaults of a method's settings stand in its signature; here is what a
signature cannot say. `register` takes methods of your own, too: docs/extending.md. Specs are read
without torch: our own classes are named here, and imported when a signature is looked at.
"""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from math import prod
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from yopo.core.losses import Loss
    from yopo.core.threat import Threat
    from yopo.methods.base import Method

HANDED = ("model", "threat", "optimizer", "loss", "generator")  # by the caller: no settings
PLAIN = (int, float, bool, str, Sequence[str], list[str])  # what a file or a flag can hold


class Setting(NamedTuple):
    """What a signature cannot say of a parameter: a line of help, and its bounds."""

    about: str = ""  # a line of help
    least: float | None = None  # allowed itself
    above: float | None = None  # not allowed itself


@dataclass(eq=False)
class Entry:
    """One method: "yopo" of `yopo-5-3-last`, its class, and what only the two together do not say.

    A spec gives the settings in `numbers`, all or none, and may end with a choice of `ending`.
    """

    name: str  # lower-case letters
    given: "type[Method] | str"  # the class, or where it is: "yopo.YOPO" of methods/yopo.py
    numbers: tuple[str, ...] = ()
    ending: str | None = None
    eta_steps: tuple[str, ...] = ()  # settings whose product is the steps of threat.step a batch
    settings: Mapping[str, Setting] = field(default_factory=dict)  # help and bounds, by name
    label: str = ""  # in reports; the name in capitals by default
    example: str = ""  # of a spec, with all its numbers; made by itself where the class is given
    attacks: bool = True  # whether it trains against an adversary
    rival: str = "pgd"  # whose time and cost reports measure its own against; "": nobody's
    hue: int | None = None  # in reports, of their palette; by default one that is free

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]+(-[a-z]+)*", self.name):
            raise ValueError(
                f"expected a name of lower-case letters, as trades-yopo, got {self.name!r}"
            )
        self.label = self.label or self.name.upper()
        self.example = self.example or (self.name if not self.numbers else "")
        if isinstance(self.given, str):
            return
        from yopo.methods.base import Method

        if not (inspect.isclass(self.given) and issubclass(self.given, Method)):
            raise TypeError(f"expected a class made from yopo.Method, got {self.given!r}")
        self.check()
        defaults = [str(self.parameters[name].default) for name in self.numbers]
        self.example = self.example or "-".join([self.name, *defaults])

    def check(self) -> None:
        """Refuse what the class's signature does not have."""
        known, ending = self.parameters, () if self.ending is None else (self.ending,)
        for name in (*self.numbers, *ending, *self.eta_steps, *self.settings):
            if name not in known:
                raise ValueError(
                    f"{self.method.__name__} has no setting {name!r}; there are: "
                    f"{', '.join(known) or 'none'}"
                )
        if self.ending is not None and get_origin(known[self.ending].annotation) is not Literal:
            raise ValueError(f"expected Literal choices of {self.ending}, to end a spec with")

    @cached_property
    def method(self) -> "type[Method]":
        """The class."""
        if not isinstance(self.given, str):
            return self.given
        home, _, name = self.given.partition(".")
        cls: type[Method] = getattr(import_module(f"yopo.methods.{home}"), name)
        return cls

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The settings: what is plain in the class's signature."""
        signature = inspect.signature(self.method, eval_str=True).parameters
        own = {name: p for name, p in signature.items() if name not in HANDED}
        for name, p in own.items():
            if p.kind is not p.KEYWORD_ONLY or p.default is p.empty or p.annotation is p.empty:
                raise ValueError(
                    f"expected {name} of {self.method.__name__} by name, with a type and a "
                    "default, as in (self, model, threat, *, m: int = 5)"
                )
        if "name" in own:
            raise ValueError(f"expected no setting called name, which is {self.name!r}")
        return {name: p for name, p in own.items() if is_plain(p.annotation)}

    @cached_property
    def pattern(self) -> str:
        """Of its specs."""
        numbers = "".join(rf"-(?P<{name}>\d+)" for name in self.numbers)
        ending = f"(?:-(?P<{self.ending}>.+))?" if self.ending else ""
        return f"{self.name}(?:{numbers})?{ending}"

    @property
    def endings(self) -> tuple[str, ...]:
        """Words that may end a spec; the default is not said."""
        if self.ending is None:
            return ()
        parameter = self.parameters[self.ending]
        return tuple(w for w in get_args(parameter.annotation) if w != parameter.default)

    def read(self, spec: str) -> dict[str, Any] | None:
        """The settings that a spec gives, or None if it is not this method's."""
        match = re.fullmatch(self.pattern, spec)
        given = match.groupdict() if match else {}
        end = given.get(self.ending) if self.ending else None
        if end is not None and end not in self.endings:
            return None
        values = {k: int(v) if k in self.numbers else v for k, v in given.items() if v is not None}
        return values if match else None

    def build(
        self,
        model: "nn.Module",
        settings: Mapping[str, Any],
        *,
        threat: "Threat",
        optimizer: "Optimizer",
        loss: "Loss",
    ) -> "Method":
        """The method itself; of threat, optimizer and loss it gets what its signature asks for."""
        handed: dict[str, Any] = {"threat": threat, "optimizer": optimizer, "loss": loss}
        asked = inspect.signature(self.method).parameters
        return self.method(model, **{k: v for k, v in handed.items() if k in asked}, **settings)

    def steps(self, settings: Mapping[str, Any]) -> int:
        """How many steps of threat.step its adversary climbs in a batch; 0 if not in such steps."""
        return prod(settings[name] for name in self.eta_steps) if self.eta_steps else 0


ENTRIES: dict[str, Entry] = {}  # in the order of tables
COUNT = Setting(least=1)
FROM_NOUGHT = Setting(least=0)


def register(entry: Entry) -> None:
    """Make the method of `entry` known; one of yours replaces an earlier one, as in a notebook."""
    there = ENTRIES.get(entry.name)
    if there is not None and isinstance(there.given, str):
        raise ValueError(f"{entry.name} is yopo.{there.method.__name__}; give yours another name")
    ENTRIES[entry.name] = entry


def read(spec: str) -> tuple[Entry, dict[str, Any]]:
    """The method that a spec names, and the settings that it gives: yopo-5-3, pgd-10, fast, …"""
    for entry in ENTRIES.values():
        if (given := entry.read(spec)) is not None:
            return entry, given
    match = re.fullmatch(r"([a-z-]*[a-z])(?:-\d+)*", spec)
    name = match[1] if match else spec
    near = difflib.get_close_matches(name, ENTRIES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near and near[0] != name else ""
    examples = ", ".join(entry.example for entry in ENTRIES.values())
    raise ValueError(f"no method {spec!r}; {hint}methods are written like {examples}")


def numbers(name: str) -> tuple[str, ...]:
    """The settings that its label counts; a run's method may be its owner's, and not known here."""
    return ENTRIES[name].numbers if name in ENTRIES else ("steps", "m", "n")


def said(settings: Mapping[str, Any]) -> str:
    """A method's settings as the paper writes them: YOPO-5-3, or YOPO-5-3 last."""
    name = settings["name"]
    entry = ENTRIES.get(name)
    values = [str(v) for k in numbers(name) if isinstance(v := settings.get(k), int)]
    label = "-".join([entry.label if entry else name.upper(), *values])
    end = settings.get(entry.ending) if entry and entry.ending else None
    return f"{label} {end}" if entry and end and end in entry.endings else label


def kind(annotation: object) -> tuple[object, bool]:
    """What a parameter holds, without `None`, and whether it may be None."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    rest = [part for part in get_args(annotation) if part is not type(None)]
    return (rest[0] if len(rest) == 1 else annotation), len(rest) < len(get_args(annotation))


def is_plain(annotation: object) -> bool:
    """Whether a parameter of that type can be a setting."""
    held, _ = kind(annotation)
    return held in PLAIN or get_origin(held) is Literal


_BETA = Setting("weight of the consistency, the paper's 1/λ", least=0)
_FIRST_LAYER = Setting("module where f0 ends; found by default")
for _entry in (
    Entry("natural", "natural.Natural", label="Natural", attacks=False, rival="", hue=7),
    Entry(
        "pgd",
        "pgd.PGD",
        ("steps",),
        eta_steps=("steps",),
        settings={"steps": COUNT},
        example="pgd-10",
        rival="",
        hue=0,
    ),
    Entry(
        "free",
        "free.Free",
        ("m",),
        settings={"m": COUNT, "step": Setting("of the adversary; eps by default", above=0)},
        label="Free",
        example="free-8",
        hue=2,
    ),
    Entry(
        "fast",
        "fast.Fast",
        settings={"step": Setting("1.25·eps by default", above=0)},
        label="FGSM-RS",
        hue=3,
    ),
    Entry(
        "nfgsm",
        "nfgsm.NFGSM",
        settings={
            "noise": Setting("radius of the noise, in eps", above=0),
            "step": Setting("eps by default", above=0),
        },
        label="N-FGSM",
        hue=4,
    ),
    Entry(
        "trades",
        "trades.TRADES",
        ("steps",),
        eta_steps=("steps",),
        settings={"steps": COUNT, "beta": _BETA},
        example="trades-10",
        rival="",
        hue=5,
    ),
    Entry(
        "yopo",
        "yopo.YOPO",
        ("m", "n"),
        ending="grad_at",
        eta_steps=("m", "n"),
        settings={"m": COUNT, "n": FROM_NOUGHT, "first_layer": _FIRST_LAYER},
        example="yopo-5-3",
        hue=1,
    ),
    Entry(
        "trades-yopo",
        "trades_yopo.TRADESYOPO",
        ("m", "n"),
        eta_steps=("m", "n"),
        settings={"m": COUNT, "n": FROM_NOUGHT, "beta": _BETA, "first_layer": _FIRST_LAYER},
        example="trades-yopo-3-4",
        rival="trades",
        hue=6,
    ),
    Entry(
        "pmp",
        "pmp.PMP",
        ("m",),
        settings={
            "m": COUNT,
            "n": Setting("steps of the adversary, where it is not exact", least=1),
            "rho": Setting("how near argmax stays to the present states", above=0),
            "steps": Setting("of L-BFGS a layer, for argmax", least=1),
            "layers": Setting("modules where f0, f1, … end; found by default"),
        },
        example="pmp-5",
        hue=8,
    ),
):
    register(_entry)
