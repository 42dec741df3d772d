"""An interrupt leaves the model as it was: at each place where Python looks for one, and real ones.

`python -m tests.core.test_interrupts SECONDS` tries more calls, for so long, and counts.
"""

import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import yopo
from tests import SEED
from tests.core.test_stays import LOOKS, STEPS, Spec, X, Y, build, differences, everything
from tests.core.test_untouched import THREAT
from yopo.core import undo

SPEC: Spec = {
    "plan": ["batchnorm", "spectral norm", "batchnorm in eval mode"],
    "twice": [0],
    "aliases": [0],
    "tied": False,
}
Call = Callable[[nn.Module], object]
Trace = tuple[str, str]  # the call, and what it left


def with_inner_loop(net: nn.Module) -> None:
    """f0 is not affine: it is run alone, and p is watched."""
    yopo.YOPO(net, THREAT, m=2, n=2, first_layer="parts.1")(X, Y).backward()


def evaluated(net: nn.Module) -> None:
    yopo.evaluate(net, (X, Y), THREAT, ["clean", "pgd-2"], checks=False)


CALLS: dict[str, Call] = {name: LOOKS[name] for name in ("attacks.pgd", "cut_names")}
CALLS |= {name: STEPS[name] for name in ("yopo after", "trades-yopo", "pgd")}
CALLS["yopo with an inner loop"] = with_inner_loop
OTHERS = ("natural", "free", "nfgsm", "trades", "pmp", "pmp argmax", "engine, yopo")
LONGER: dict[str, Call] = {name: STEPS[name] for name in OTHERS} | {"evaluate": evaluated}
LONGER |= {name: LOOKS[name] for name in ("attacks.cw", "Split.propagate", "diagnose")}
TRAINS = ("engine, yopo",)  # steps an optimizer


def of_the_process() -> tuple[object, ...]:
    """What is torch's own, and of the blocks that are open."""
    kinds = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    return torch.is_grad_enabled(), parametrize._cache_enabled, kinds, len(undo._open.blocks)


class Trial:
    """A network, and what it and torch were like before a call."""

    def __init__(self) -> None:
        self.net = build(SPEC)
        self.before, self.torchs = everything(self.net), of_the_process()
        self.weights = [p.detach().clone() for p in self.net.parameters()]

    def traces(self, name: str) -> list[Trace]:
        """What is otherwise now. A gradient may be there if all of it is."""
        asking = {p.grad is None for p in self.net.parameters() if p.requires_grad}
        found = differences(self.before, everything(self.net))
        found |= {"half a gradient"} if len(asking) > 1 else set()
        pairs = zip(self.weights, self.net.parameters(), strict=True)
        if not (name in TRAINS or all(torch.equal(*pair) for pair in pairs)):
            found.add("weights")
        if of_the_process() != self.torchs:
            found.add("torch's own")
        return [(name, trace) for trace in sorted(found)]


# ---------------------------------------------------------------- each place in turn

BLOCKS = {undo.__file__, contextlib.__file__}
Place = tuple[object, ...]


@contextmanager
def interrupted(places: list[Place], at: int = -1) -> Iterator[None]:
    """Note where Python looks for signals on the way into and out of blocks; raise at one of them.

    That is where a function of Python's begins, and where one of C's has ended.
    """

    def look(frame: FrameType, event: str, _: object) -> None:
        back = frame.f_back
        if event not in ("call", "c_return") or back is None:
            return
        if {frame.f_code.co_filename, back.f_code.co_filename} & BLOCKS:
            places.append((frame.f_code, frame.f_lasti, event, back.f_code, back.f_lasti))
            if len(places) - 1 == at:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def at_each_place(calls: Mapping[str, Call]) -> tuple[int, list[Trace]]:
    """How many places were tried, each with one call, and the traces."""
    met, found = set[Place](), list[Trace]()
    for name, call in calls.items():
        call(build(SPEC))  # what it does once alone
        trial, places = Trial(), list[Place]()
        with interrupted(places):
            call(trial.net)
        found += trial.traces(name)
        last = {place: at for at, place in enumerate(places)}
        for place in last.keys() - met:
            trial = Trial()
            with suppress(KeyboardInterrupt), interrupted([], last[place]):
                call(trial.net)
            found += trial.traces(name)
        met |= last.keys()
    return len(met), found


# A generator may end in an interrupt, which Python then reports and drops.
dropped = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@dropped
def test_an_interrupt_at_any_place_leaves_no_trace() -> None:
    places, found = at_each_place(CALLS)
    assert found == []
    assert places > 300


# ---------------------------------------------------------------- real ones


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


def really_interrupted(call: Call, net: nn.Module, seconds: float) -> bool:
    """Do it; a signal comes after so many seconds, if it takes that long."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call(net)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def tried(calls: Mapping[str, Call], seconds: float) -> tuple[Counter[str], list[Trace]]:
    """Interrupt the calls at random moments for so long: how often each was, and the traces."""
    rng, hit, found, lasts = random.Random(SEED), Counter[str](), list[Trace](), {}
    handler = signal.signal(signal.SIGALRM, stopped)
    try:
        for name, call in calls.items():
            call(build(SPEC))
            began = time.perf_counter()
            call(build(SPEC))
            lasts[name] = time.perf_counter() - began
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name, trial = rng.choice([*calls]), Trial()
            moment = rng.uniform(1e-4, lasts[name])
            hit[name] += really_interrupted(calls[name], trial.net, moment)
            found += trial.traces(name)
    finally:
        signal.signal(signal.SIGALRM, handler)
    return hit, found


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such timer here")
@dropped
def test_real_interrupts_leave_no_trace() -> None:
    hit, found = tried(CALLS, seconds=3)
    assert found == []
    assert hit.total() > 10


RECORD = Path(__file__).parents[2] / "records/interrupts-cpu/interrupts.json"


def test_the_pages_have_the_records_numbers() -> None:
    found = json.loads(RECORD.read_text())
    assert (found["traces"], found["places"]["traces"]) == ([], [])
    assert {*found["interrupts"]} == {*CALLS, *LONGER}
    many, places = sum(found["interrupts"].values()), found["places"]["tried"]
    design = " ".join((RECORD.parents[2] / "docs/design.md").read_text().split())
    assert f"{many:,} signals and an interrupt at each of {places:,} places left no" in design
    records = (RECORD.parents[1] / "README.md").read_text()
    assert f"{many:,} real interrupts" in records


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    places, at_places = at_each_place(CALLS | LONGER)
    hit, found = tried(CALLS | LONGER, float(sys.argv[1]))
    numbers = {"interrupts": hit, "traces": found}
    numbers |= {"places": {"tried": places, "traces": at_places}, "torch": torch.__version__}
    print(json.dumps(numbers, indent=1))
