"""How far the adversaries of TRADES-10 and TRADES-YOPO-m-n get, by step and by propagations.

Usage: python -m benchmarks.adversary WEIGHTS [--images 256] [--root DATA]

WEIGHTS is a run folder or a file of weights in one. All attack in eval mode, from the same uniform
point of the ball or, where it is said, from 0.001·N(0, 1) as the released code does. One line each:
the KL between the predictions on clean and attacked images, which is what TRADES' adversary
ascends; the accuracy under attack; and the share of images on which the network gets surer of what
it said of the clean one. The last line ascends the cross-entropy instead, as PGD-10 does.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import yopo
from yopo.core.first_layer import Split
from yopo.core.frozen import Frozen
from yopo.core.hamiltonian import ascend
from yopo.core.propagation import Objective
from yopo.data import load
from yopo.methods.trades import consistency_with
from yopo.runs.saved import find, load_model

# (m, n, steps in 255ths); m rounds of n = 1 are TRADES-m
KINDS = ((10, 1, (2.0,)), (3, 4, (1.0, 1.5, 2.0, 3.0)), (5, 2, (2.0,)), (2, 5, (2.0,)))


def main() -> None:
    """Attack with each adversary and print how far it got."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--root", type=Path)
    args = parser.parse_args()

    saved = find(args.weights)
    config, file = saved.config, saved.weights
    data = load(config.data.name, root=args.root)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(saved, data).eval().to(device)
    x = data.x_test[: args.images].to(device) / 255
    y = data.y_test[: args.images].to(device)
    split, eps = Split(model), config.threat.eps
    split.cut(x)
    consistency = consistency_with(Frozen(model), x)
    with torch.no_grad():
        clean = model(x).softmax(1)

    def line(name: str, eta: Tensor) -> None:
        with torch.no_grad():
            logits = model(x + eta)
        said, before = clean.argmax(1, keepdim=True), clean.amax(1)
        accuracy = (logits.argmax(1) == y).float().mean().item()
        surer = (logits.softmax(1).gather(1, said)[:, 0] > before).float().mean().item()
        kl = consistency(logits).item()
        print(f"{name:34} {kl:8.4f} {100 * accuracy:8.1f} {100 * surer:8.1f}", flush=True)

    def attacked(m: int, n: int, step: float, objective: Objective, near: bool = False) -> Tensor:
        threat, generator = yopo.Linf(eps, step / 255), torch.Generator(device).manual_seed(0)
        eta = threat.start(x, generator)
        if near:
            noise = torch.randn(x.shape, generator=generator, device=device)
            eta = threat.project(0.001 * noise, x)
        for _ in range(m):
            eta = ascend(threat, x, eta, split.propagate(x + eta, objective, weights=None), n)
        return eta

    print(f"{file.parent.name}/{file.name}, {len(x)} test images, L∞ of {255 * eps:g}/255")
    print(f"{'adversary':34} {'KL':>8} {'accuracy':>8} {'surer':>8}")
    line("none", torch.zeros_like(x))
    for m, n, steps in KINDS:
        name = f"TRADES-{m}" if n == 1 else f"TRADES-YOPO-{m}-{n}"
        for step in steps:
            line(f"{name}, step {step:g}/255", attacked(m, n, step, consistency))
        line(f"{name}, from 0.001·N(0, 1)", attacked(m, n, 2.0, consistency, near=True))
    line("PGD-10, step 2/255", attacked(10, 1, 2.0, lambda logits: F.cross_entropy(logits, y)))


if __name__ == "__main__":
    main()
