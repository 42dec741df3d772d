"""Refuse bad input with a sentence that names the fix, before anything is changed."""

import sys
from numbers import Integral, Real

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

ROUNDING = 1e-6  # by which arithmetic may leave [0, 1]; threats bring x + eta back


def check_module(model: nn.Module) -> None:
    """The model is one of torch's modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def check_trainable(model: nn.Module) -> None:
    """The model has something to train."""
    check_module(model)
    check_unflattened(model)
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters, so there is nothing to train")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter requires gradients; call model.requires_grad_() first")


def check_unflattened(model: nn.Module) -> None:
    """No FullyShardedDataParallel, the first kind of FSDP, is in the model or around it."""
    there = sys.modules.get("torch.distributed.fsdp")  # where it was never loaded, none is used
    if there is None:
        return
    first_kind = any(isinstance(m, there.FullyShardedDataParallel) for m in model.modules())
    # One around the model leaves parts or views of its own in the parameters' places, or nothing.
    if not first_kind and any(hasattr(m, "_is_fsdp_managed_module") for m in model.modules()):
        slots = [p for m in model.modules() for p in m._parameters.values() if p is not None]
        whole = (isinstance(p, nn.Parameter) and not hasattr(p, "_fsdp_flattened") for p in slots)
        first_kind = not slots or not all(whole)
    if first_kind:
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) joins the parameters into flat ones, and a method's "
            "own passes do not run there; use torch.distributed.fsdp.fully_shard on each block and "
            "on the network instead"
        )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """The optimizer trains the model, or some of it, without asking for the loss again."""
    if isinstance(optimizer, LBFGS):
        raise ValueError("expected an optimizer whose step() needs no closure, got LBFGS")
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has none of the model's parameters; make it anew")


def check_loss(loss: object) -> None:
    """A loss is a function of logits and targets."""
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise TypeError(
            f"expected loss as a function of logits and targets, as F.cross_entropy or "
            f"nn.CrossEntropyLoss(), got {loss!r}"
        )


def check_threat(threat: object) -> None:
    """A threat has a radius, a step and three operations."""
    needed = ("eps", "step", "start", "project", "ascend")
    if isinstance(threat, type) or not all(hasattr(threat, name) for name in needed):
        raise TypeError(f"expected a threat, as yopo.Linf(8 / 255), got {threat!r}")


def check_at_least(name: str, value: int, least: int) -> None:
    """A count such as m, n or steps is a whole number of at least `least`."""
    given: object = value  # NumPy has whole numbers of its own
    if isinstance(given, bool) or not isinstance(given, Integral) or value < least:
        raise ValueError(f"expected {name} to be a whole number of at least {least}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """An option is one of its choices."""
    if value not in choices:
        raise ValueError(f"expected {name} to be {' or '.join(map(repr, choices))}, got {value!r}")


def check_images(x: Tensor, model: nn.Module) -> None:
    """Images (B, ...) are floating point, finite, in [0, 1] and where the model is."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected images as a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point images in [0, 1], got {x.dtype}; use x / 255")
    if x.dim() < 2:
        raise ValueError(
            f"expected a batch of images (B, ...), got shape {tuple(x.shape)}; use x.unsqueeze(0)"
        )
    if x.numel() == 0:
        raise ValueError(f"expected at least one image, got an empty batch {tuple(x.shape)}")
    parameter = next(model.parameters(), x)
    if x.device != parameter.device:
        raise ValueError(
            f"images are on {x.device}, the model is on {parameter.device}; "
            f"use x.to({str(parameter.device)!r})"
        )
    low, high = torch.stack(torch.aminmax(x)).tolist()  # both NaN if any value is
    if low >= -ROUNDING and high <= 1 + ROUNDING:
        return
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        raise ValueError("expected finite images, got NaN or infinite values; clean the data first")
    fix = "put the normalisation inside the model (yopo.Normalize)"
    if low >= 0 and 8 < high <= 255:
        fix = "use x / 255"
    elif low > -0.1 and high < 1.1:  # as interpolation leaves them
        fix = "use x.clamp(0, 1)"
    raise ValueError(f"expected images in [0, 1], got values from {low:.6g} to {high:.6g}; {fix}")


def check_targets(y: Tensor, x: Tensor, classes: int | None) -> None:
    """Targets are class indices (B,) or one row of values per image; `classes` if known."""
    if not isinstance(y, Tensor):
        raise TypeError(f"expected targets as a torch.Tensor, got {type(y).__name__}")
    if y.device != x.device:
        raise ValueError(f"targets are on {y.device}, images on {x.device}; use y.to(x.device)")
    if y.dim() == 0 or len(y) != len(x):
        raise ValueError(
            f"expected one target per image, got targets of shape {tuple(y.shape)} "
            f"for {len(x)} images"
        )
    if classes == 1:  # its softmax is always 1
        raise ValueError(
            "expected a model with an output for each class, got one output z; let it return "
            "torch.cat([torch.zeros_like(z), z], 1), or train it with "
            "loss=F.binary_cross_entropy_with_logits"
        )
    if classes is not None:
        _check_kind(y, classes)
    low, high = torch.stack(torch.aminmax(y)).tolist()
    if y.is_floating_point():
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            raise ValueError("expected finite targets, got NaN or infinite values")
    elif classes is not None and not (low >= 0 and high < classes):
        raise ValueError(
            f"expected labels from 0 to {classes - 1} for a model with {classes} outputs, "
            f"got labels from {low} to {high}; renumber the labels or widen the last layer"
        )


def _check_kind(y: Tensor, classes: int) -> None:
    """Class indices (B,), or rows (B, classes) of floating-point numbers."""
    soft = y.is_floating_point()
    if y.dim() == (2 if soft else 1) and (not soft or y.shape[1] == classes):
        return
    fix = "check the targets"
    if y.dim() == 2 and y.shape[1] == 1:
        fix = "use y.squeeze(1).long()"
    elif soft and y.dim() == 1:
        fix = "use y.long()"
    elif not soft and y.dim() == 2 and y.shape[1] == classes:
        fix = "use y.argmax(1) for class indices, or y.float() for soft targets"
    raise ValueError(
        f"expected class indices (B,), or soft targets (B, {classes}) of floating point, "
        f"got {tuple(y.shape)} of {y.dtype}; {fix}"
    )


def check_eta(eta: Tensor, x: Tensor) -> None:
    """A given perturbation fits the images."""
    if not isinstance(eta, Tensor) or not eta.is_floating_point():
        got = eta.dtype if isinstance(eta, Tensor) else type(eta).__name__
        raise ValueError(f"expected eta as a floating-point torch.Tensor, got {got}")
    if eta.shape != x.shape or eta.device != x.device:
        raise ValueError(
            f"expected eta like the images, {tuple(x.shape)} on {x.device}, "
            f"got {tuple(eta.shape)} on {eta.device}"
        )
    if not bool(eta.isfinite().all()):
        raise ValueError("expected a finite eta, got NaN or infinite values")


def check_step(step: float) -> float:
    """A step size is a positive, finite number."""
    return check_positive("step", step)


def check_positive(name: str, value: float) -> float:
    """A size is a positive, finite number."""
    given: object = value
    if not isinstance(given, Real):
        raise TypeError(f"expected {name} as a number, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"expected {name} > 0, got {value}; leave it out for the default")
    return float(value)


def check_attack(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """An attack has a network, images and class indices to work on."""
    check_module(model)
    check_images(x, model)
    check_targets(y, x, None)
    if y.dtype != torch.long or y.dim() != 1:
        raise ValueError(f"expected labels (B,) of type int64, got {tuple(y.shape)} of {y.dtype}")
