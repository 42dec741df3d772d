"""An interrupt leaves the model as it was: at each place where Python looks for one, and real ones.

`python -m tests.core.test_interrupts SECONDS` sends real ones for so long, and counts.
"""

import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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


def with_inner_loop(net: nn.Module) -> None:
    """f0 is not affine: it is run alone, and p is watched."""
    yopo.YOPO(net, THREAT, m=2, n=2, first_layer="parts.1")(X, Y).backward()


def evaluated(net: nn.Module) -> None:
    yopo.evaluate(net, (X, Y), THREAT, ["clean", "pgd-2"], checks=False)


CALLS: dict[str, Call] = {name: LOOKS[name] for name in ("attacks.pgd", "cut_names")}
CALLS |= {name: STEPS[name] for name in ("yopo after", "trades-yopo", "pgd")}
CALLS["yopo with an inner loop"] = with_inner_loop
LONGER = {name: STEPS[name] for name in ("trades", "pmp", "pmp argmax", "engine, yopo")}
LONGER["evaluate"] = evaluated


def of_the_process() -> tuple[object, ...]:
    """What is torch's own, and of the blocks that are open."""
    kinds = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    return torch.is_grad_enabled(), parametrize._cache_enabled, kinds, len(undo._open.blocks)


class Trial:
    """A network, and what it and torch were like before a call."""

    def __init__(self) -> None:
        self.net = build(SPEC)
        self.before, self.torchs = everything(self.net), of_the_process()

    def traces(self) -> set[str]:
        """What is otherwise now. A gradient may be there if all of it is."""
        asking = {p.grad is None for p in self.net.parameters() if p.requires_grad}
        found = differences(self.before, everything(self.net))
        found |= {"half a gradient"} if len(asking) > 1 else set()
        return found | ({"torch's own"} if of_the_process() != self.torchs else set())


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
def test_an_interrupt_at_any_place_leaves_no_trace() -> None:
    met: set[Place] = set()
    for name, call in CALLS.items():
        call(build(SPEC))  # what it does once alone
        trial, places = Trial(), list[Place]()
        with interrupted(places):
            call(trial.net)
        assert trial.traces() == set()
        last = {place: at for at, place in enumerate(places)}
        for place in last.keys() - met:
            trial = Trial()
            with suppress(KeyboardInterrupt), interrupted([], last[place]):
                call(trial.net)
            assert (name, place, trial.traces()) == (name, place, set())
        met |= last.keys()
    assert len(met) > 300


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


def tried(calls: Mapping[str, Call], seconds: float) -> tuple[Counter[str], list[tuple[str, str]]]:
    """Interrupt the calls at random moments for so long: how often each was, and the traces."""
    rng, hit, found, lasts = random.Random(SEED), Counter[str](), list[tuple[str, str]](), {}
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
            found += [(name, trace) for trace in trial.traces()]
    finally:
        signal.signal(signal.SIGALRM, handler)
    return hit, found


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such timer here")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_real_interrupts_leave_no_trace() -> None:
    hit, found = tried(CALLS, seconds=3)
    assert found == []
    assert hit.total() > 10


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    hit, found = tried(CALLS | LONGER, float(sys.argv[1]))
    print(hit.total(), "interrupts", dict(hit), Counter(found))
