"""Attacks over a whole data set: only images still standing are attacked, in full batches.

Every attack starts from the images that are classified correctly and goes over those it has not
broken yet, once for each restart or stage, packed into full batches anew each time. Several
processes deal these batches out among them, so that each is what it would be in one.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from yopo.attacks.autoattack import Phase, Stages
from yopo.attacks.cw import descend
from yopo.attacks.names import Attack, Own
from yopo.attacks.pgd import LOSSES, climb
from yopo.attacks.steps import step_size
from yopo.attacks.strongest import Strongest
from yopo.core.checks import ROUNDING, check_attack, check_targets
from yopo.core.crew import ALONE, Crew
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import margin
from yopo.core.random import Counted
from yopo.core.threat import L2, Linf, Threat
from yopo.evaluation.images import Data
from yopo.evaluation.network import Network, products

Tell = Callable[[str, float, float], None]  # attack, part done, accuracy so far

NEAR = 2**18  # pixels: so many stay near a CPU while their starts are drawn


@dataclass(frozen=True, slots=True)
class Piece:
    """What one batch of one attack found. Rows count the images of the data set."""

    rows: Tensor  # (B,)
    wrong: Tensor  # (B,) bool
    images: Tensor  # the adversarial images of those that are wrong, or (0,) if not asked for
    seconds: float
    cost: float  # images times full propagations


class Memory(Protocol):
    """Where finished pieces are kept, so that an interrupted run need not repeat them."""

    def recall(self, key: str) -> Piece | None:
        """The piece of that key, if it was kept."""

    def keep(self, key: str, piece: Piece) -> None:
        """Keep a piece."""


@dataclass(slots=True)
class Outcome:
    """What one attack did to the data set."""

    correct: Tensor  # (N,) bool: classified correctly, whatever this attack tried
    seconds: float = 0.0
    cost: float = 0.0
    after: dict[str, Tensor] = field(default_factory=dict)  # `correct` after each of its stages
    index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    images: Tensor | None = None  # adversarial images of `index`, if asked for

    @property
    def accuracy(self) -> float:
        """Share of images that are classified correctly."""
        return float(self.correct.double().mean())


def run(
    net: Network,
    data: Data,
    threat: Threat,
    attacks: Sequence[Attack],
    *,
    batch: int = 250,
    seed: int = 0,
    step: float | None = None,
    examples: bool = False,
    memory: Memory | None = None,
    progress: Tell | None = None,
    crew: Crew = ALONE,
) -> dict[str, Outcome]:
    """Every attack's outcome by name, `clean` first and always; the model is left as it was.

    step: of PGD and cw-linf; `step_size` unless given. crew: processes that have the same network
    and images; all get the outcome, but the adversarial images go to the first. `progress` is then
    called in all of them, at the same moments.
    """
    tell = progress or (lambda *_: None)
    with torch.inference_mode(False), products("float32"), eval_mode(net):
        f = Frozen(net)
        logits, clean = _clean(net, f, data, batch, tell, crew)
        plans: list[tuple[Attack, Sequence[Phase]]] = []  # all of them before any runs
        for attack in attacks:
            if attack.kind == "autoattack":
                stages = Stages(f, threat, seed, logits.shape[1], net.device)
                plans.append((attack, stages.phases(attack.stages)))
            elif attack.own is not None:
                plans.append((attack, [_callers(attack.name, attack.own, net, threat, seed)]))
            elif attack.kind != "clean":
                plans.append((attack, _ours(attack, f, threat, seed, step)))
        suite = _Suite(net, f, data, logits, clean.correct, batch, examples, memory, tell, crew)
        return {"clean": clean} | {a.name: suite.attack(a, phases) for a, phases in plans}


def _ours(attack: Attack, f: Frozen, threat: Threat, seed: int, step: float | None) -> list[Phase]:
    """The phases of our own attacks: one for each restart."""
    check_norm(attack, threat)
    step = step_size(threat, attack.steps) if step is None else step

    def restart(x: Tensor, y: Tensor, clean: Tensor, number: int) -> tuple[Tensor, Tensor]:
        best = Strongest(f, x, y, LOSSES[attack.loss], clean)
        eta = starts(threat, x, f"{seed}/{number}")
        climb(best, eta, threat, steps=attack.steps, step=step, until_broken=True)
        return best.images, best.wrong

    def cw(x: Tensor, y: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
        best = Strongest(f, x, y, margin, clean)
        descend(best, threat, steps=attack.steps, until_broken=True)
        return best.images, best.wrong

    if attack.kind == "cw":
        return [cw]
    return [partial(restart, number=number) for number in range(attack.restarts)]


def _callers(name: str, attack: Own, net: Network, threat: Threat, seed: int) -> Phase:
    """The one phase of an attack of the caller's: it finds images, the verdict is ours."""
    f = Frozen(net)

    def phase(x: Tensor, y: Tensor, _clean: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(x.device).manual_seed(_drawn(f"{seed}/{name}", x))

        def work(net: nn.Module) -> object:
            with torch.enable_grad(), eval_mode(net):
                return attack(net, x.clone(), y.clone(), threat, generator)

        images = Frozen(net).run(work)  # of its own: the attack may move what this one holds
        if not isinstance(images, Tensor) or images.shape != x.shape:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"expected {name} to return images {tuple(x.shape)}, got {got}")
        eta = images.detach().to(x) - x
        inside = threat.project(eta, x)
        if not (moved := float((inside - eta).abs().max())) <= ROUNDING:  # NaN too
            raise ValueError(
                f"{name} left the threat's ball, or the box [0, 1], by {moved:.3g}; let it return "
                "x + threat.project(x_adv - x, x)"
            )
        with torch.no_grad():
            logits = f(x + inside)
        return x + inside, (logits.argmax(1) != y) & ~logits.isnan().any(1)

    return phase


def check_norm(attack: Attack, threat: Threat) -> None:
    """Refuse an attack that knows another ball only."""
    if attack.name.startswith("cw-linf") and isinstance(threat, L2):
        raise ValueError(f"{attack.name} is an attack in L∞, got an L2 threat; use cw")


def starts(threat: Threat, x: Tensor, purpose: str) -> Tensor:
    """A random start for each image (B, ...), drawn from the image itself and `purpose` alone.

    So it is the same wherever the image stands: in any batch, order, subset and on any device. A
    threat that draws in its own way gets a generator for each image, which takes longer.
    """
    own = getattr(type(threat), "start", None) not in (Linf.start, L2.start)
    if isinstance(threat, Linf | L2) and not own:
        few = max(1, NEAR // x[0].numel()) if x.device.type == "cpu" else len(x)
        return torch.cat([threat.start_counted(part, Counted(purpose)) for part in x.split(few)])
    generator, etas = torch.Generator(), []
    for image in x.cpu().contiguous().split(1):
        generator.manual_seed(_drawn(purpose, image))
        etas.append(threat.start(image, generator))
    return torch.cat(etas).to(x.device)


def _drawn(purpose: str, x: Tensor) -> int:
    """A seed from `purpose` and the images."""
    digest = hashlib.sha256(purpose.encode() + x.cpu().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _clean(
    net: Network, f: Frozen, data: Data, batch: int, tell: Tell, crew: Crew
) -> tuple[Tensor, Outcome]:
    """Logits (N, C) and what is right without an attack; the data are checked on the way."""
    started, before = time.perf_counter(), net.cost
    parts = torch.arange(len(data)).split(batch)
    share = crew.share(parts)
    mine: list[Tensor] = []

    def answers() -> Iterator[int]:
        for rows, x in zip(share, data.batches(share), strict=True):
            y = data.labels(rows)
            check_attack(net, x, y)
            with torch.no_grad():
                logits = f(x)
            check_targets(y, x, logits.shape[1])
            mine.append(logits)
            yield int(_right(logits, y).sum())

    right = 0
    for many, more in crew.rounds(len(parts), answers()):
        done, right = min(many * batch, len(data)), right + more
        tell("clean", done / len(data), right / done)
    logits = crew.rows(mine, share, len(data), data.dtype).to(data.device)
    correct = _right(logits, data.labels(torch.arange(len(data)))).cpu()
    (cost,) = crew.sums(net.cost - before)
    return logits, Outcome(correct, time.perf_counter() - started, cost)


def _right(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


@dataclass(slots=True)
class _Suite:
    """Runs attacks on what stands after the clean pass."""

    net: Network
    f: Frozen
    data: Data
    logits: Tensor
    correct: Tensor  # (N,) on clean images
    batch: int
    examples: bool
    memory: Memory | None
    tell: Tell
    crew: Crew

    def attack(self, attack: Attack, phases: Sequence[Phase]) -> Outcome:
        """Run all phases."""
        outcome = Outcome(self.correct.clone())
        shown = [(outcome.index, self.data.images(outcome.index).cpu())] if self.examples else []
        done = 0.0
        for number, phase in enumerate(phases):
            rows = outcome.correct.nonzero()[:, 0]  # packed anew
            parts = rows.split(self.batch) if len(rows) else ()
            left, mine = len(rows), list[Piece]()
            staged = len(attack.stages) > 1
            name = f"{attack.name}: {attack.stages[number]}" if staged else attack.name
            if parts:  # the first batch may take minutes
                self.tell(name, number / len(phases), left / len(self.data))
            pieces = self._pieces(attack, number, phase, parts, mine)
            for many, fallen in self.crew.rounds(len(parts), pieces):
                done, left = (number + many / len(parts)) / len(phases), left - fallen
                self.tell(name, done, left / len(self.data))
            fell = self._fallen(mine, outcome)
            outcome.correct &= ~fell
            if self.examples:
                shown += self._shown([part[fell[part]] for part in parts], mine, shown[0][1])
            if staged:
                outcome.after[attack.stages[number]] = outcome.correct.clone()
        if done < 1:  # all were broken before the last phase
            self.tell(attack.name, 1.0, outcome.accuracy)
        if self.examples:
            broken, images = zip(*shown, strict=True)
            outcome.index, order = torch.cat(broken).sort()
            outcome.images = torch.cat(images)[order] if self.crew.rank == 0 else None
        return outcome

    def _pieces(
        self,
        attack: Attack,
        number: int,
        phase: Phase,
        parts: Sequence[Tensor],
        mine: list[Piece],
    ) -> Iterator[int]:
        """How many images of each part fell; what this process's share came to goes into `mine`."""
        memory = None if attack.own else self.memory  # an own one may be another by the next time
        share = [f"{attack.name}.{number}.{k}" for k in self.crew.share(range(len(parts)))]
        rows = dict(zip(share, self.crew.share(parts), strict=True))
        known = {key: self._known(key, rows[key], memory) for key in share}
        images = self.data.batches([rows[key] for key in share if known[key] is None])
        for key in share:
            piece = known[key]
            if piece is None:
                piece = self._piece(phase, rows[key], images)
                if memory is not None:
                    memory.keep(key, piece)
            mine.append(piece)
            yield int(piece.wrong.sum())

    def _known(self, key: str, rows: Tensor, memory: Memory | None) -> Piece | None:
        """The piece that was kept, if it is of these rows and shows what is asked for."""
        known = None if memory is None else memory.recall(key)
        if known is None or not torch.equal(known.rows, rows):
            return None
        shows = not self.examples or known.images.shape[1:] == self.data.pictures.shape
        return known if shows else None

    def _piece(self, phase: Phase, rows: Tensor, batches: Iterator[Tensor]) -> Piece:
        """Attack these rows, whose images come next."""
        started, cost = time.perf_counter(), self.net.cost
        x = next(batches)
        y, logits = self.data.labels(rows), self.logits[rows.to(self.logits.device)]
        with products(self.net.precision):
            adversarial, wrong = phase(x, y, logits)
        if self.net.precision == "tf32":  # the verdict is float32's
            with torch.no_grad():
                doubtful = wrong & (self.f(adversarial.clone()).argmax(1) == y)
            if doubtful.any():
                again = phase(x[doubtful], y[doubtful], logits[doubtful])
                adversarial[doubtful], wrong[doubtful] = again
        images = adversarial[wrong].cpu() if self.examples else torch.empty(0)
        wrong = wrong.cpu()  # waits for the device
        seconds = time.perf_counter() - started
        return Piece(rows, wrong, images, seconds, self.net.cost - cost)

    def _fallen(self, mine: Sequence[Piece], outcome: Outcome) -> Tensor:
        """Which images (N,) fell in this phase, in any process; time and cost go to the outcome."""
        fell = torch.zeros(len(self.data), dtype=torch.bool)
        for piece in mine:
            fell[piece.rows[piece.wrong]] = True
        took = [0.0] * self.crew.world
        took[self.crew.rank] = sum(piece.seconds for piece in mine)
        cost, *took = self.crew.sums(sum(piece.cost for piece in mine), *took)
        outcome.seconds += max(took)  # the others waited
        outcome.cost += cost
        return self.crew.union(fell)

    def _shown(
        self, broken: Sequence[Tensor], mine: Sequence[Piece], like: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows that fell, part by part, and their adversarial images in the first process."""
        own = iter(mine)
        for k, rows in enumerate(broken):
            owner = k % self.crew.world
            images = next(own).images if owner == self.crew.rank else None
            yield rows, self.crew.to_first(owner, images, like, len(rows))
