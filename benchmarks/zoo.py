"""YOPO on other people's networks: a small one of most families in torchvision and timm.

Usage: pip install timm torchvision; python -m benchmarks.zoo [--only timm:res] [--json FILE]
Each network, with random weights, is trained by one step of YOPO-2-3 as it is, found f0 and all. In
eval mode, where passes repeat, the perturbation is compared with that of the paper's loop written
out (`literal`), and nothing of the network may have changed but .grad.
"""

import argparse
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import yopo

M, N = 2, 3
LARGEST = 40e6  # parameters
Make = Callable[[], nn.Module]
Zoo = Iterator[tuple[str, Make, int]]  # name, network, size of its images


def literal(model: nn.Module, f0: str, x: Tensor, y: Tensor, eta: Tensor, t: yopo.Linf) -> Tensor:
    """eta^{m,n} by the paper's formula: p from a full pass, then n steps up p·f0(x + eta)."""
    if not f0:  # the identity
        model, f0 = nn.Sequential(nn.Identity(), model), "0"
    outputs: list[Tensor] = []

    def note(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        outputs.append(out)
        return out.clone()  # the next module may write into it

    low, high = (-x).clamp(min=-t.eps), (1 - x).clamp(max=t.eps)
    with model.get_submodule(f0).register_forward_hook(note):
        for _ in range(M):
            logits = model((x + eta).requires_grad_())
            (p,) = torch.autograd.grad(F.cross_entropy(logits, y), outputs.pop())
            for _ in range(N):
                eta = eta.detach().requires_grad_()
                model(x + eta)
                (grad,) = torch.autograd.grad((p * outputs.pop()).sum(), eta)
                eta = torch.minimum(torch.maximum(eta + t.step * grad.sign(), low), high).detach()
    return eta


def study(model: nn.Module, size: int) -> dict[str, Any]:
    """What YOPO made of one network."""
    x, y = torch.rand(2, 3, size, size), torch.tensor([1, 2])
    threat = yopo.Linf(8 / 255)
    eta = threat.start(x)
    before = {k: v.clone() for k, v in model.eval().state_dict().items()}
    method = yopo.YOPO(model, threat, m=M, n=N)
    found = method.backward(x, y, eta).eta
    cut = method.split.cut(x)
    agree = (found - literal(model, cut.name, x, y, eta, threat)).abs() < 1e-6
    after = model.state_dict()
    row = {
        "f0": cut.name,
        "affine": cut.affine,
        "agree": agree.double().mean().item(),  # share of pixels
        "untouched": all(torch.equal(v, after[k]) for k, v in before.items()),
    }
    model.train().zero_grad()
    try:
        method.backward(x, y)
    except ValueError as error:
        return row | {"trains": False, "because": str(error)}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return row | {"trains": bool(grads) and all(bool(g.isfinite().all()) for g in grads)}


def of_torchvision() -> Zoo:
    """The smallest classifier of each of torchvision's files."""
    models = importlib.import_module("torchvision.models")
    families: dict[str, dict[str, Make]] = {}
    for name in models.list_models(module=models):
        file = models.get_model_builder(name).__module__
        extra = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        make = partial(models.get_model, name, weights=None, **extra)
        families.setdefault(file, {})[name] = make
    for makers in families.values():
        if name := smallest(makers):
            yield f"torchvision:{name}", makers[name], 299 if name == "inception_v3" else 224


def of_timm() -> Zoo:
    """The smallest of some models of each of timm's files, at its own image size."""
    timm = importlib.import_module("timm")
    for file in timm.list_modules():
        names = sorted(timm.list_models(module=file), key=len)
        small = [n for n in names if any(w in n for w in ("tiny", "small", "nano", "atto", "_s"))]
        some = [*names[:4], *small[:4]]
        makers = {name: partial(timm.create_model, name, pretrained=False) for name in some}
        if name := smallest(makers):
            config = timm.get_pretrained_cfg(name)
            yield f"timm:{name}", makers[name], config.input_size[1] if config else 224


def smallest(makers: Mapping[str, Make]) -> str | None:
    """The name of the network with the fewest parameters, unless it is large all the same."""
    sizes: dict[str, int] = {}
    for name, make in makers.items():
        try:
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in make().parameters())
        except Exception:  # some cannot be made there
            continue
    fit = [name for name, size in sizes.items() if size <= LARGEST]
    return min(fit, key=lambda name: sizes[name], default=None)


def main() -> None:
    """Go through both zoos, a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="how names begin, as timm:res")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)  # so that no sign of a gradient is a matter of rounding
    rows: dict[str, dict[str, Any]] = {}
    for zoo in (of_torchvision, of_timm):
        for name, make, size in zoo():
            if not name.startswith(args.only):
                continue
            torch.manual_seed(0)
            try:
                rows[name] = study(make(), size)
            except Exception as error:
                rows[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            print(f"{name:44}", *(f"{k}={v}" for k, v in rows[name].items()), flush=True)
    if args.json:
        versions = {
            n: importlib.import_module(n).__version__ for n in ("torch", "torchvision", "timm")
        }
        args.json.write_text(json.dumps({"versions": versions, "networks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
