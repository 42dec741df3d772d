"""What all training methods share: checked input, gradients all or none, one kind of answer."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from yopo.core.checks import (
    check_eta,
    check_images,
    check_loss,
    check_targets,
    check_threat,
    check_trainable,
    check_unflattened,
)
from yopo.core.exchange import watch
from yopo.core.first_layer import Cut, Split
from yopo.core.frozen import (
    Frozen,
    all_or_nothing,
    eval_mode,
    forked_rng,
    made_of,
    uncached,
    uncompiled,
)
from yopo.core.handed import check_hooks, put_aside
from yopo.core.losses import Loss
from yopo.core.parallel import own_passes, parallel, training_step
from yopo.core.propagation import Objective, no_logits
from yopo.core.threat import Threat
from yopo.core.undo import Undo, surely

C = TypeVar("C", bound=Callable[..., Any])


def as_written(work: C) -> C:
    """A function that runs as it is written also in a step that the user gave to torch.compile."""

    @wraps(work)
    def run(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        if torch.compiler.is_compiling():  # disable() loads the compiler; who has none needs none
            return torch.compiler.disable(work)(*args, **kwargs)
        return work(*args, **kwargs)

    return cast(C, run)


@dataclass(frozen=True, slots=True)
class Step:
    """What one `backward` did. The tensors are detached; reading them costs nothing extra."""

    loss: Tensor  # (), the loss whose gradient was left in .grad
    logits: Tensor  # (B, C), at x + eta in the last weight-gradient pass
    eta: Tensor  # (B, ...), the last perturbation
    propagations: float  # full passes spent; attack-only ones count 2/3, forward-only ones 1/3

    def __repr__(self) -> str:
        """Its numbers, and the shapes of what is large."""
        loss, reach = self.loss.item(), self.eta.abs().amax().item()
        shapes = f"logits {tuple(self.logits.shape)}, eta {tuple(self.eta.shape)} up to {reach:.3g}"
        return f"Step(loss {loss:.4g}, {shapes}, {self.propagations:.3g} propagations)"


class Method(ABC):
    """A way to train. `backward` fills .grad of the model's parameters.

    `loss = method(x, y)` is the same as a loss, for frameworks that call `loss.backward()`. Else
    it changes only what any training pass does, BatchNorm's statistics; Free also steps its
    optimizer. The engine, the trainer and checkpoints ask a method for its class attributes, for
    `model` and `loss`, and for `backward`, `prepare`, `cut`, `settings`, `on`, `run`, `state_dict`
    and `load_state_dict`, and for nothing else. The trainer sets `threat` while the radius grows,
    and `m` where the phases of its schedule have one of their own.
    """

    compares_classes = False  # with one logit, whose softmax is always 1, it would do nothing
    layer_by_layer = False  # it does not run the network as a whole, so no compiled one will do
    threat: Threat | None = None
    generator: torch.Generator | None = None
    optimizer: Optimizer | None = None  # the one that it steps itself, inside a batch
    split: Split | None = None  # the network as g ∘ f0, if it makes use of that

    def __init__(self, model: nn.Module, *, loss: Loss | None) -> None:
        check_trainable(model)
        check_loss(loss)
        if any(m.static_graph for m in parallel(model) if m is not model):
            raise ValueError(
                "DistributedDataParallel with static_graph=True would count attack passes as steps;"
                " let it be the outermost module, around torch.compile and yopo.Normalize"
            )
        self.model = model
        self.loss: Loss = F.cross_entropy if loss is None else loss
        self._classes: int | None = None
        self._made_of: tuple[nn.Module, ...] = ()
        self.last: Step | None = None  # of the last `method(x, y)`

    def __repr__(self) -> str:
        """As YOPO(ResNet, Linf(eps=8/255, step=2/255), m=5, n=3, grad_at='after')."""
        parts = [type(self.model).__name__, *([] if self.threat is None else [repr(self.threat)])]
        parts += [f"{name}={value!r}" for name, value in self.settings().items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    @as_written
    @surely
    def backward(self, x: Tensor, y: Tensor, eta: Tensor | None = None) -> Step:
        """Accumulate this method's weight gradient in .grad, as `loss.backward()` does.

        x: images (B, ...) in [0, 1]. y: class indices (B,), or soft targets (B, C).
        eta: where the perturbation starts; by default each method's own start.
        """
        check_hooks(self.model, self._trained(), type(self).__name__, self._weight_passes())
        watch(self.model)
        with uncached():
            checked = self._checked(x, y, eta)
            with training_step(type(self).__name__), all_or_nothing(self.model, self._trained()):
                return self._run(*checked)

    @as_written
    @surely
    def __call__(self, x: Tensor, y: Tensor, eta: Tensor | None = None) -> Tensor:
        """A loss () whose backward() adds to .grad what `backward` would have added.

        It may be scaled, divided and summed like any other, and hands out its gradients once.
        Nothing is in .grad before that. What the method did besides is in `last`.
        """
        if self.optimizer is not None:
            raise ValueError(
                f"{type(self).__name__} steps its optimizer inside a batch, so that no one loss "
                "has its gradient; use method.backward(x, y) in a loop of your own"
            )
        if not torch.is_grad_enabled():
            raise ValueError(
                "method(x, y) is a loss to call backward() on, and gradients are switched off "
                "here; to measure a network, use yopo.evaluate"
            )
        watch(self.model, handed=True)
        self.last = None  # its tensors make room for the next
        with uncached(), own_passes(), put_aside(self.model, self._trained()) as aside:
            checked, loss = self._checked(x, y, eta), self.loss
            with Undo(lambda: setattr(self, "loss", loss)):
                self.loss = aside.hearing(loss)
                self.last = self._run(*checked)
        return aside.handed(self.last.loss)

    def _weight_passes(self) -> int:
        """How many of its passes add to .grad for one gradient."""
        return 1

    def _trained(self) -> Iterable[nn.Parameter]:
        """What may get a gradient: the network's parameters, and the loss's if it is a module."""
        of_network = self.model.parameters()
        if not isinstance(self.loss, nn.Module):
            return of_network
        return {id(p): p for p in (*of_network, *self.loss.parameters())}.values()

    def _checked(
        self, x: Tensor, y: Tensor, eta: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The batch and the start as `_run` takes them."""
        self.prepare(x, y)
        if eta is not None:
            check_eta(eta, x)
            eta = eta.detach().to(x.dtype)
        return plain(x), plain(y if y.is_floating_point() else y.long()), eta

    @surely
    @own_passes()
    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Check a batch, and study the network on it if this is the first; trains nothing."""
        if torch.is_inference_mode_enabled():
            raise ValueError("training needs gradients; leave torch.inference_mode() first")
        check_images(x, self.model)
        made_of_now = made_of(self.model)
        if self._classes is None or self._made_of != made_of_now:
            check_unflattened(self.model)  # it may have been wrapped since
            self._classes, self._made_of = count_classes(self.model, x), made_of_now
        if self.compares_classes and self._classes < 2:
            raise ValueError(
                f"{type(self).__name__} compares the predictions of two or more classes, got a "
                "model with one output z; let it return torch.cat([torch.zeros_like(z), z], 1)"
            )
        # With a loss of the user's own, targets may be of its own kind too.
        known = getattr(self.loss, "func", self.loss) is F.cross_entropy
        known = known and "ignore_index" not in getattr(self.loss, "keywords", {})
        check_targets(y, x, self._classes if known else None)
        self.cut(x)

    def cut(self, x: Tensor) -> Cut | None:
        """Where f0 ends on inputs like x (B, ...), if it makes use of that."""
        return None if self.split is None else self.split.cut(x)

    def settings(self) -> dict[str, Any]:
        """Its numbers and choices by name: m, n, grad_at, …"""
        kinds = (int, float, str)
        return {k: v for k, v in vars(self).items() if isinstance(v, kinds) and k[0] != "_"}

    def on(
        self, model: nn.Module, *, threat: Threat | None, loss: Loss, split: Split | None
    ) -> Self:
        """The same method on another form of its network, with such forms of its parts."""
        other = copy.copy(self)
        other.model, other.threat, other.loss, other.split = model, threat, loss, split
        return other

    @surely
    def run(self, x: Tensor, y: Tensor) -> Step:
        """As `backward`, but x and y are not checked, and .grad holds half of it after an error."""
        with training_step(type(self).__name__):
            return self._run(x, y, None)

    def state_dict(self) -> dict[str, Tensor]:
        """What it carries from batch to batch, by name: tensors (B, ...), one row an image."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these very tensors; what is not among them starts anew."""
        if state:
            raise ValueError(f"{type(self).__name__} carries nothing, got {', '.join(state)}")

    @abstractmethod
    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        """The algorithm, on checked input."""

    def _objective(self, y: Tensor) -> Objective:
        """The loss as a function of the logits."""
        return lambda logits: self.loss(logits, y)


class AdversarialMethod(Method):
    """A way to train against a threat. model, threat, loss, generator: as for `yopo.YOPO`."""

    threat: Threat

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        loss: Loss | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(model, loss=loss)
        check_threat(threat)
        self.threat = threat
        self.generator = generator

    def _start(self, x: Tensor, eta: Tensor | None) -> Tensor:
        """eta^0: uniform in the ball, or the user's own, brought into ball and box."""
        if eta is None:
            return self.threat.start(x, self.generator)
        return self.threat.project(eta, x)


def carried_over(state: Tensor | None, x: Tensor) -> Tensor:
    """What the last batch left, cut or filled up with zeros if x (B, ...) is of another size."""
    rows = torch.zeros_like(x)
    if state is not None and state.shape[1:] == x.shape[1:]:
        size = min(len(x), len(state))
        rows[:size] = state[:size]
    return rows


def plain(t: Tensor) -> Tensor:
    """Its values alone, as a tensor that autograd takes."""
    return t.clone() if t.is_inference() else t.detach()


def count_classes(model: nn.Module, x: Tensor) -> int:
    """Ask the model, leaving no trace, how many logits it gives for each of x (B, ...)."""
    try:
        with torch.no_grad(), eval_mode(model), forked_rng(x):
            logits = Frozen(uncompiled(model))(x.clone())
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ValueError(
            "the network differentiates by its own parameters in forward(), and passes of an "
            "attack let them ask for no gradients; such networks cannot be attacked here"
        ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        raise ValueError(f"{no_logits(logits)} for {len(x)} images")
    return logits.shape[1]
