"""Settings that do nothing in a training: refused where no recipe may have said them, else named.

A recipe's own drops or step may come to nothing under a flag (`--schedule.name cosine`), and a run
that was begun with idle settings must go on, so of those a line is said and training begins.
"""

import math
from collections.abc import Iterator

from yopo.methods.registry import ENTRIES
from yopo.runs.schedule import NEAR
from yopo.runs.sections import DataConfig, ScheduleConfig
from yopo.runs.settings import Config

ALREADY_HERE = ("mnist-subset", "npz")  # data that are not looked for in data.root


def refuse_idle(data: DataConfig) -> None:
    """Refuse what training on these data does not use; evaluations of earlier runs still go."""
    for name in ("resize", "interpolation"):
        if getattr(data, name) != getattr(DataConfig(), name):
            raise ValueError(
                f"data.{name} is for `yopo eval` of a network of someone else's; leave it out"
            )
    if data.name in ALREADY_HERE and data.root is not None and not data.root.exists():
        where = "is built in" if data.name == "mnist-subset" else "is the file data.path"
        raise ValueError(
            f"there is no data.root {data.root}, and {data.name} does not use one: it {where}; "
            "leave out --data.root, or say --data.name folder"
        )
    if data.skip_broken and data.name != "folder" and ":" not in data.name:
        raise ValueError(
            f"data.skip_broken is for folders of pictures; leave it out with {data.name}"
        )


def said_of_idle(config: Config) -> list[str]:
    """A line for each setting that does nothing in this training, with what would let it."""
    return [*_of_rate(config), *_of_phases(config), *_of_adversary(config)]


def _of_rate(config: Config) -> Iterator[str]:
    c, end = config.schedule, config.epochs
    drops, factor = f"schedule.drops {_listed(c.drops)}", f"schedule.factor {c.factor:g}"
    if c.name != "piecewise":
        given = [drops] * bool(c.drops) + [factor] * (c.factor != ScheduleConfig().factor)
        if given:
            yield (
                f"no effect with schedule.name {c.name}: {' and '.join(given)}; the rate drops "
                "with --schedule.name piecewise"
            )
    elif not c.drops:
        yield (
            "schedule.name piecewise without schedule.drops is a rate that never drops; say at "
            "which epochs, as --schedule.drops 30,36"
        )
    elif late := _from(end, c.drops):
        yield (
            f"schedule.drops {_listed(late)} are never reached in {end} epochs; give earlier ones, "
            "or more --epochs"
        )
    if c.warmup > end + NEAR:
        yield (
            f"schedule.warmup {c.warmup:g} is longer than the {end} epochs, so the rate never "
            f"reaches optimizer.lr; give --schedule.warmup below {end}, or more --epochs"
        )


def _of_phases(config: Config) -> Iterator[str]:
    c, end = config.schedule, config.epochs
    if c.phases and not (c.sizes or c.m):
        yield (
            f"no effect without --schedule.sizes or --schedule.m, which say what is other in a "
            f"phase: schedule.phases {_listed(c.phases)}"
        )
    elif late := _from(end, c.phases):
        yield (
            f"schedule.phases {_listed(late)} never begin in {end} epochs; give earlier ones, or "
            "more --epochs"
        )


def _of_adversary(config: Config) -> Iterator[str]:
    entry, threat, end = ENTRIES[config.method.name], config.threat, config.epochs
    if not entry.attacks:  # the threat is then what evaluations attack with, and that is plain
        if config.train_eps != 1:
            yield (
                f"no effect in training with {entry.name}, which has no adversary: train_eps "
                f"{config.train_eps:g}"
            )
        return
    # A step of eps/4, as most recipes have it, is what none would be.
    other = threat.step and not math.isclose(threat.step, threat.eps / 4)
    if other and (instead := _own_steps(config)):
        yield f"no effect in training with {entry.name}: threat.step {threat.step:.3g}; {instead}"
    if config.eps_warmup > end + NEAR:
        yield (
            f"eps_warmup {config.eps_warmup:g} is longer than the {end} epochs, so the adversary "
            f"never reaches eps; give --eps_warmup below {end}, or more --epochs"
        )


def _own_steps(config: Config) -> str:
    """What a method of ours steps by that does not climb in steps of threat.step; else nothing."""
    entry, settings = ENTRIES[config.method.name], config.method.model_dump()
    if not isinstance(entry.given, str) or entry.eta_steps:  # what a user's does is not known
        return ""
    if "step" in settings:
        return "its step is --method.step"
    if settings.get("adversary") in ("exact", "lbfgs"):
        return (
            f"the {settings['adversary']} adversary has no steps, --method.adversary gradient has"
        )
    return ""


def _from(end: int, epochs: list[float]) -> list[float]:
    """Those that so many epochs do not reach."""
    return [epoch for epoch in epochs if epoch > end - NEAR]


def _listed(epochs: list[float]) -> str:
    return ",".join(f"{epoch:g}" for epoch in epochs)
