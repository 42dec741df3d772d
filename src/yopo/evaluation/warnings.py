"""Signs that a robust accuracy is not what it seems; docs/warnings.md explains each code.

`before` probes the network on a few images, `after` looks at what finished attacks found. Neither
proves anything: each suspicion says what was measured, what it may mean and what to do next.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Binomial
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from yopo.attacks import pgd
from yopo.attacks.steps import step_size
from yopo.core.checks import ROUNDING
from yopo.core.frozen import Frozen
from yopo.core.losses import margin
from yopo.core.names import named
from yopo.core.threat import L2, Linf, Threat
from yopo.evaluation.probe import STEPS, falls, steepest, untouched, withstands

SAMPLE = 64  # images that the probes see


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One reason to doubt the numbers."""

    code: str  # also the anchor of its section in docs/warnings.md
    text: str


def before(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    step: float | None = None,
    steps: int = 20,
) -> list[Suspicion]:
    """Probe the model, as the user passed it, at images x (N, ...) with labels y (N,).

    step, steps: of the PGD to come; the threat's own step unless given. Costs about 90 passes of
    at most 64 images, taken evenly from x. The model and all random streams are left as found.
    """
    doubts = [*_training_mode(model), *_short_steps(threat, step, steps)]
    if outside := list(_input_range(x)):
        return doubts + outside
    n = min(len(x), SAMPLE)
    chosen = torch.arange(n, device=x.device) * len(x) // n
    with untouched(model, x):
        return doubts + list(_probes(model, x[chosen].detach(), y[chosen].long(), threat))


def after(
    correct: Mapping[str, Tensor], y: Tensor, classes: int, threat: Threat | None = None
) -> list[Suspicion]:
    """Compare finished attacks, `clean` among them: which images (N,) stay classified as y."""
    return [*_chance(correct, y, classes), *_black_box(correct), *_cw_alone(correct, threat)]


def _probes(model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> Iterator[Suspicion]:
    """All that needs passes through the network."""
    f = Frozen(model)
    beside = threat.start(x, torch.Generator(x.device).manual_seed(0))
    with torch.no_grad():
        logits, again = f(x.clone()), f(x.clone())
        alone = f(x[:2].clone())
        near = f(x + beside)
    yield from _not_numbers(logits)
    yield from _probabilities(logits)
    yield from (randomness := list(_randomness(logits, again)))
    if not randomness:
        yield from (randomness := list(_batch_dependence(logits[:2], alone)))
    if not randomness and bool(logits.isfinite().all()):
        yield from (randomness := list(_not_numbers_beside(near)))
    right = (logits.argmax(1) == y) & ~logits.isnan().any(1)
    if not right.any():
        return
    x, y = x[right], y[right]
    entropy = partial(F.cross_entropy, reduction="none")
    value, slope = steepest(f, x, y, entropy)
    alive = steepest(f, x, y, margin)[1] > 0
    yield from _zero_gradients(alive)
    yield from (vanishing := list(_vanishing(value[alive], slope[alive])))
    if randomness or not alive.any():  # walks that are random or cannot move compare nothing
        return
    x, y = x[alive], y[alive]
    if false := list(_false_gradients(falls(f, x, y, threat))):
        yield from false
        return
    many = withstands(f, x, y, threat, one_step=False)
    one = withstands(f, x, y, threat, one_step=True)
    yield from _weaker("weaker-with-steps", one, many)
    if not vanishing:
        entropies = withstands(f, x, y, threat, one_step=False, loss=entropy)
        yield from _weaker("cross-entropy-weaker", many, entropies)
    if isinstance(threat, Linf | L2):
        linf, twice = isinstance(threat, Linf), 2 * threat.eps
        if not linf or twice <= 1:  # the range of pixels
            double = withstands(f, x, y, threat.resized(twice, twice / 4), one_step=False)
            yield from _weaker("weaker-with-eps", many, double)
        whole = 1.0 if linf else x[0].numel() ** 0.5
        yield from _unbounded(model, x, y, threat.resized(whole, whole / 4))


def _training_mode(model: nn.Module) -> Iterator[Suspicion]:
    kinds = (_NormBase, _DropoutNd)
    names = [n for n, m in named(model) if m.training and isinstance(m, kinds)]
    if names:
        yield Suspicion(
            "training-mode",
            f"{len(names)} normalisation or dropout modules were passed in training mode, first "
            f"{names[0]!r}; the attacks run them in eval mode. The numbers hold for the network in "
            "eval mode only: call model.eval() before you use it.",
        )


def _short_steps(threat: Threat, step: float | None, steps: int) -> Iterator[Suspicion]:
    """From a random start, the far side of the ball is up to 2·eps away."""
    reach = steps * (threat.step if step is None else step) / threat.eps
    if reach < 2 * (1 - 1e-6):  # rounding
        yield Suspicion(
            "step-too-small",
            f"{steps} steps reach {reach:.2g}·eps, but from a random start the far side of the "
            "ball is up to 2·eps away, so PGD may end before it arrives; use a step of at least "
            f"{2 * threat.eps / steps:.2g}, or more steps.",
        )


def _input_range(x: Tensor) -> Iterator[Suspicion]:
    low, high = (float(v) for v in torch.aminmax(x.detach()))  # both NaN if any value is
    inside = low >= -ROUNDING and high <= 1 + ROUNDING
    if x.is_floating_point() and inside and high - low >= 0.1:
        return
    advice = "put the normalisation inside the model (yopo.Normalize)"
    if not (math.isfinite(low) and math.isfinite(high)):
        advice = "clean the data"
    elif not x.is_floating_point() or high >= 128:
        advice = "use x / 255"
    elif inside:
        advice = "see whether they were divided by 255 twice"
    yield Suspicion(
        "input-range",
        f"expected images that use the range [0, 1], got {x.dtype} from {low:.4g} to {high:.4g}, "
        f"so eps does not mean what it says and the network was not probed; {advice}.",
    )


def _not_numbers(logits: Tensor) -> Iterator[Suspicion]:
    if (bad := ~logits.isfinite().all(1)).any():
        yield Suspicion(
            "not-finite",
            f"the outputs for {_share(bad)} of {len(bad)} images looked at are NaN or infinite. A "
            "clean image with a NaN counts as misclassified, and an attack gets no credit for one. "
            "Find the layer that overflows or divides by zero.",
        )


def _probabilities(logits: Tensor) -> Iterator[Suspicion]:
    """Log-probabilities are no problem: log-softmax changes no cross-entropy and no margin."""
    tolerance = 1e-3 if torch.finfo(logits.dtype).bits >= 32 else 0.05
    near_one = (logits.sum(1) - 1).abs() < tolerance
    if len(logits) > 1 and bool((near_one & (logits >= 0).all(1)).all()):
        yield Suspicion(
            "probabilities",
            f"the outputs for all {len(logits)} images looked at are non-negative and sum to 1, as "
            "after a softmax; losses that take them for logits have gradients that are too flat. "
            "Return the logits, without the softmax.",
        )


def _randomness(logits: Tensor, again: Tensor) -> Iterator[Suspicion]:
    """Some kernels add numbers in varying order, so a difference of rounding is no sign."""
    differs = (logits - again).abs().amax(1) / logits.abs().amax()
    random = differs > torch.finfo(logits.dtype).eps ** 0.5
    if random.any():
        yield Suspicion(
            "random-forward",
            f"two passes in eval mode differ on {_share(random)} of the images, by up to "
            f"{differs.max():.1g} of the largest output, so what fools one draw need not fool the "
            "next. Fix the randomness or average gradients over many draws; probes that compare "
            "attacks were skipped.",
        )


def _batch_dependence(logits: Tensor, alone: Tensor) -> Iterator[Suspicion]:
    """Kernels for other sizes of a batch round otherwise, in bf16 perhaps, which is no sign."""
    differs = (logits - alone).abs().amax(1) / logits.abs().amax()
    moved = differs > max(0.01, torch.finfo(logits.dtype).eps ** 0.5)
    if moved.any():
        yield Suspicion(
            "batch-dependent",
            "in a batch of two images their outputs differ from those in a larger batch, by up to "
            f"{differs.max():.1g} of the largest: the answer to one image depends on the others, "
            "and so do these accuracies. Look for statistics taken over the batch; "
            "probes that compare attacks were skipped.",
        )


def _not_numbers_beside(near: Tensor) -> Iterator[Suspicion]:
    if (bad := near.isnan().any(1)).any():
        yield Suspicion(
            "not-finite",
            f"at a random point of the ball the outputs are NaN for {_share(bad)} of {len(bad)} "
            "images looked at, though not at the images themselves. An attack gets no credit for a "
            "NaN, so robust accuracy is too high. Find what refuses perturbed images.",
        )


def _zero_gradients(alive: Tensor) -> Iterator[Suspicion]:
    if not alive.all():
        yield Suspicion(
            "zero-gradients",
            f"for {_images(~alive)} the margin's gradient is zero or not finite in every pixel, "
            "so gradient attacks cannot move and prove nothing. Trust square, or replace the layer "
            "that blocks the gradient by a differentiable one for the attack (BPDA).",
        )


def _false_gradients(fallen: Tensor) -> Iterator[Suspicion]:
    """Up a direction that has nothing to do with the network, half of the margins would fall."""
    if fallen.double().mean() > 0.25:
        yield Suspicion(
            "false-gradients",
            f"for {_images(fallen)} a step of eps/10 up the margin's gradient lowers the margin: "
            "the gradient is not that of the output, or oscillates within the step. Trust square, "
            "and look for detached or replaced gradients and for shattering layers; probes that "
            "walk along it were skipped.",
        )


def _vanishing(value: Tensor, slope: Tensor) -> Iterator[Suspicion]:
    """Given the cross-entropy and its steepest slope, where the margin's gradient is alive.

    Once the true class's probability rounds to 1, its logit drops out of the gradient. Some such
    images are common in networks trained the usual way and do no harm; most of them do.
    """
    precision = torch.finfo(torch.promote_types(value.dtype, torch.float32)).eps
    rounded, zero = value < precision / 2, slope == 0
    if rounded.double().mean() > 0.75 or zero.double().mean() > 0.05:
        yield Suspicion(
            "vanishing-cross-entropy",
            f"the true class has probability 1 to rounding for {_share(rounded)} of the correctly "
            f"classified images, and the cross-entropy's gradient is exactly zero for "
            f"{_share(zero)}, though the margin's is not. Trust attacks on the margin (cw-linf, "
            "apgd-t), or divide the logits by a constant.",
        )


# Two attacks each: what to say where the second, which should be no weaker, leaves more images.
PAIRS = {
    "cross-entropy-weaker": (
        f"{STEPS} steps up the margin",
        "as many up the cross-entropy: PGD on the latter is too weak here, as where the logits are "
        "small. Trust attacks on the margin (cw-linf, apgd-t).",
    ),
    "weaker-with-steps": (
        "one step of size eps",
        f"withstand {STEPS} smaller ones: past the first step the gradient leads astray. Add "
        "square, and look for layers that shatter gradients.",
    ),
    "weaker-with-eps": (
        f"{STEPS} steps at eps",
        "at 2·eps, although that ball holds the smaller one. Add square, and look for parts that "
        "react to large perturbations.",
    ),
}


def _weaker(code: str, weak: Tensor, strong: Tensor) -> Iterator[Suspicion]:
    """Sign test: do clearly more images stand under `strong` alone than under `weak` alone?"""
    lost, gained = int((~weak & strong).sum()), int((weak & ~strong).sum())
    if lost > gained and _tail(lost, lost + gained, 0.5) < 0.01:
        first, second = PAIRS[code]
        yield Suspicion(code, f"{_images(weak)} withstand {first}, but {_share(strong)} {second}")


def _unbounded(model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> Iterator[Suspicion]:
    """Given a ball so large that any image may become any other."""
    adversarial = pgd(
        model,
        x,
        y,
        threat,
        steps=STEPS,
        step=step_size(threat, STEPS),
        loss="margin",
        generator=torch.Generator(x.device).manual_seed(0),
    )
    with torch.no_grad():
        stands = Frozen(model)(adversarial).argmax(1) == y
    if stands.double().mean() > 0.1:
        yield Suspicion(
            "unbounded-eps",
            f"{_images(stands)} withstand PGD-{STEPS} at eps={threat.eps:.3g}, where any image may "
            "become any other: the gradients lead nowhere. Trust square, and look for what masks "
            "the gradients.",
        )


def _chance(correct: Mapping[str, Tensor], y: Tensor, classes: int) -> Iterator[Suspicion]:
    """Is one label for all images as good? Silent where even a perfect answer could not tell."""
    n, right = len(y), int(correct["clean"].sum())
    chance = max(1 / classes, int(y.bincount().amax()) / n)
    if chance**n < 0.05 <= _tail(right, n, chance):
        yield Suspicion(
            "chance",
            f"clean accuracy is {right / n:.1%} of {n} images, not clearly above the {chance:.1%} "
            "of one label for all, so there is no robustness to measure. Look for wrong weights, "
            "labels in another order, or images prepared otherwise than in training.",
        )


def _black_box(correct: Mapping[str, Tensor]) -> Iterator[Suspicion]:
    white = [v for k, v in correct.items() if k not in ("clean", "square", "autoattack")]
    if "square" not in correct or not white:
        return
    standing = torch.stack(white).all(0) & correct["clean"]
    alone, n = int((standing & ~correct["square"]).sum()), len(standing)
    if alone > 0 and _tail(alone, n, 0.01) < 0.01:
        yield Suspicion(
            "black-box-stronger",
            f"square, which uses no gradients, broke {alone} of {n} images that no attack with "
            f"gradients broke ({_share(standing)} withstand those): the gradients are masked, or "
            "those attacks too weak. Trust the worst case over all attacks; add apgd-t, more "
            "restarts, and more queries for square.",
        )


def _cw_alone(correct: Mapping[str, Tensor], threat: Threat | None) -> Iterator[Suspicion]:
    others = [name for name in correct if name != "clean" and not name.startswith("cw")]
    if isinstance(threat, L2) and "clean" in correct and len(correct) > 1 and not others:
        yield Suspicion(
            "cw-alone",
            f"cw is the only attack, and in L2 it is a weak one: its steps have a fixed rate, "
            f"whatever the radius ({threat.eps:.3g} here), so robust accuracy is too high. Add "
            "pgd-50 or autoattack.",
        )


def _tail(k: int, n: int, p: float) -> float:
    """The probability of at least k successes in n tries."""
    each = Binomial(n, torch.tensor(p, dtype=torch.float64))
    return float(each.log_prob(torch.arange(k, n + 1, dtype=torch.float64)).exp().sum())


def _images(which: Tensor) -> str:
    return f"{_share(which)} of {len(which)} correctly classified images"


def _share(images: Tensor) -> str:
    return f"{images.double().mean():.0%}"
