"""Attacks over a whole data set: only images still standing are attacked, in full batches.

Every attack starts from the images that are classified correctly and goes over those it has not
broken yet, once for each restart or stage, packed into full batches anew each time.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
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
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import margin
from yopo.core.random import Counted
from yopo.core.threat import L2, Linf, Threat
from yopo.evaluation.network import Network, products

Tell = Callable[[str, float, float], None]  # attack, part done, accuracy so far


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


@dataclass(slots=True)
class Data:
    """Images and labels, where they are; batches of them where the network is."""

    x: Tensor  # (N, ...) floating point in [0, 1], or uint8
    y: Tensor  # (N,) int64
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, net: Network, x: Tensor, y: Tensor) -> "Data":
        """For that network."""
        return cls(x, y, net.device, net.dtype)

    def images(self, rows: Tensor) -> Tensor:
        """Images of these rows as numbers in [0, 1]."""
        x = self.x[rows.to(self.x.device)]
        x = x.to(self.dtype) / 255 if x.dtype == torch.uint8 else x.to(self.dtype)
        return x.to(self.device)

    def labels(self, rows: Tensor) -> Tensor:
        """Labels of these rows."""
        return self.y[rows.to(self.y.device)].to(self.device)


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
) -> dict[str, Outcome]:
    """Every attack's outcome by name, `clean` first and always; the model is left as it was.

    step: of PGD and cw-linf; `step_size` unless given.
    """
    tell = progress or (lambda *_: None)
    with torch.inference_mode(False), products("float32"), eval_mode(net):
        f = Frozen(net)
        logits, clean = _clean(net, f, data, batch, tell)
        plans: list[tuple[Attack, Sequence[Phase]]] = []  # all of them before any runs
        for attack in attacks:
            if attack.kind == "autoattack":
                stages = Stages(f, threat, seed, logits.shape[1], net.device)
                plans.append((attack, stages.phases(attack.stages)))
            elif attack.own is not None:
                plans.append((attack, [_callers(attack.name, attack.own, net, threat, seed)]))
            elif attack.kind != "clean":
                plans.append((attack, _ours(attack, f, threat, seed, step)))
        suite = _Suite(net, f, data, logits, clean.correct, batch, examples, memory, tell)
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
    if type(threat).start in (Linf.start, L2.start):
        return threat.start(x, Counted(purpose))  # type: ignore[arg-type]
    generator, etas = torch.Generator(), []
    for image in x.cpu().contiguous().split(1):
        generator.manual_seed(_drawn(purpose, image))
        etas.append(threat.start(image, generator))
    return torch.cat(etas).to(x.device)


def _drawn(purpose: str, x: Tensor) -> int:
    """A seed from `purpose` and the images."""
    digest = hashlib.sha256(purpose.encode() + x.cpu().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _clean(net: Network, f: Frozen, data: Data, batch: int, tell: Tell) -> tuple[Tensor, Outcome]:
    """Logits (N, C) and what is right without an attack; the data are checked on the way."""
    started, before, answers = time.perf_counter(), net.cost, []
    rows = torch.arange(len(data.x))
    outcome = Outcome(torch.zeros(len(rows), dtype=torch.bool))
    for part in rows.split(batch):
        x, y = data.images(part), data.labels(part)
        check_attack(net, x, y)
        with torch.no_grad():
            logits = f(x)
        check_targets(y, x, logits.shape[1])
        right = (logits.argmax(1) == y) & ~logits.isnan().any(1)
        outcome.correct[part] = right.cpu()
        answers.append(logits)
        done = int(part[-1]) + 1
        tell("clean", done / len(rows), float(outcome.correct[:done].double().mean()))
    outcome.seconds, outcome.cost = time.perf_counter() - started, net.cost - before
    return torch.cat(answers), outcome


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

    def attack(self, attack: Attack, phases: Sequence[Phase]) -> Outcome:
        """Run all phases."""
        outcome = Outcome(self.correct.clone())
        pieces: list[Piece] = []
        done = 0.0
        for number, phase in enumerate(phases):
            rows = outcome.correct.nonzero()[:, 0]  # packed anew
            parts = rows.split(self.batch) if len(rows) else ()
            for k, part in enumerate(parts):
                # The caller's own may be another by the next time.
                memory = None if attack.own else self.memory
                piece = self._piece(f"{attack.name}.{number}.{k}", phase, part, memory)
                outcome.correct[part[piece.wrong]] = False
                outcome.seconds += piece.seconds
                outcome.cost += piece.cost
                pieces.append(piece)
                done = (number + (k + 1) / len(parts)) / len(phases)
                self.tell(attack.name, done, outcome.accuracy)
            if len(attack.stages) > 1:
                outcome.after[attack.stages[number]] = outcome.correct.clone()
        if done < 1:  # all were broken before the last phase
            self.tell(attack.name, 1.0, outcome.accuracy)
        if self.examples:
            broken = [p.rows[p.wrong] for p in pieces] or [outcome.index]
            outcome.index, order = torch.cat(broken).sort()
            empty = self.data.images(outcome.index[:0]).cpu()
            outcome.images = torch.cat([empty, *(p.images for p in pieces)])[order]
        return outcome

    def _shows(self, piece: Piece) -> bool:
        return not self.examples or piece.images.shape[1:] == self.data.x.shape[1:]

    def _piece(self, key: str, phase: Phase, rows: Tensor, memory: Memory | None) -> Piece:
        known = None if memory is None else memory.recall(key)
        if known is not None and torch.equal(known.rows, rows) and self._shows(known):
            return known
        started, cost = time.perf_counter(), self.net.cost
        x, y = self.data.images(rows), self.data.labels(rows)
        logits = self.logits[rows.to(self.logits.device)]
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
        piece = Piece(rows, wrong, images, seconds, self.net.cost - cost)
        if memory is not None:
            memory.keep(key, piece)
        return piece
