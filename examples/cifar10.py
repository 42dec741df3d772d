"""CIFAR-10 with `method.backward` in a plain loop: PreAct-ResNet18, bf16, then PGD-20.

Usage: python examples/cifar10.py cifar10.npz --method yopo-5-3 --epochs 15
cifar10.npz: x_train (50000, 32, 32, 3) uint8, y_train, x_test, y_test, as written by
`yopo data get cifar10 --dir .`
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import yopo

EPS = 8 / 255
METHODS: dict[str, Callable[[nn.Module], yopo.Method]] = {
    "natural": yopo.Natural,
    "pgd-10": lambda net: yopo.PGD(net, yopo.Linf(EPS), steps=10),
    "fast": lambda net: yopo.Fast(net, yopo.Linf(EPS)),
    "nfgsm": lambda net: yopo.NFGSM(net, yopo.Linf(EPS)),
    "trades-10": lambda net: yopo.TRADES(net, yopo.Linf(EPS), steps=10),
    "trades-yopo-3-4": lambda net: yopo.TRADESYOPO(net, yopo.Linf(EPS), m=3, n=4),
    "yopo-5-3": lambda net: yopo.YOPO(net, yopo.Linf(EPS), m=5, n=3),
    "yopo-5-3-before": lambda net: yopo.YOPO(net, yopo.Linf(EPS), m=5, n=3, grad_at="before"),
    "yopo-5-3-layer1": lambda net: yopo.YOPO(
        net, yopo.Linf(EPS), m=5, n=3, first_layer="net.layer1"
    ),
}


def augment(x: Tensor) -> Tensor:
    """Shift by up to 4 pixels and mirror, each image on its own."""
    size, side = len(x), x.shape[-1]
    x = F.pad(x, (4, 4, 4, 4))
    rows = torch.randint(9, (size, 1), device=x.device) + torch.arange(side, device=x.device)
    columns = torch.randint(9, (size, 1), device=x.device) + torch.arange(side, device=x.device)
    mirrored = torch.rand(size, 1, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(size, device=x.device)[:, None, None]
    return x.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def main() -> None:
    """Train, then attack the whole test set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--method", choices=METHODS, default="yopo-5-3")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with np.load(args.data) as file:
        x_train, y_train, x_test, y_test = (
            torch.from_numpy(file[name]).to(device)
            for name in ("x_train", "y_train", "x_test", "y_test")
        )
    x_train, x_test = x_train.permute(0, 3, 1, 2), x_test.permute(0, 3, 1, 2)
    y_train, y_test = y_train.long(), y_test.long()

    model = nn.Sequential()
    model.add_module("normalize", yopo.Normalize((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)))
    model.add_module("net", yopo.models.preactresnet18(width=args.width))
    model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method = METHODS[args.method](model)
    steps = len(x_train) // args.batch
    optimizer = torch.optim.SGD(
        model.parameters(), args.rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.rate, total_steps=args.epochs * steps, cycle_momentum=False
    )
    seconds = propagations = 0.0
    for epoch in range(args.epochs):
        started, right = time.perf_counter(), torch.zeros((), device=device)
        for chosen in torch.randperm(len(x_train), device=device).split(args.batch)[:steps]:
            x, y = augment(x_train[chosen] / 255), y_train[chosen]
            with torch.autocast(device.type, torch.bfloat16):
                out = method.backward(x.contiguous(memory_format=torch.channels_last), y)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            propagations += out.propagations / steps
            right += (out.logits.argmax(1) == y).sum()
        accuracy = float(right) / (steps * args.batch)  # waits for the device
        seconds += time.perf_counter() - started
        print(
            f"{args.method} epoch {epoch + 1:>3}  {seconds:7.1f} s  train {accuracy:.4f}",
            flush=True,
        )

    model.eval()
    generator = torch.Generator(device).manual_seed(0)
    clean = robust = 0
    for x, y in zip(x_test.split(500), y_test.split(500), strict=True):
        adversarial = yopo.attacks.pgd(
            model, x / 255, y, yopo.Linf(EPS, 2 / 255), steps=20, generator=generator
        )
        with torch.no_grad():
            clean += int((model(x / 255).argmax(1) == y).sum())
            robust += int((model(adversarial).argmax(1) == y).sum())
    total = len(x_test)
    print(
        f"{args.method}: {args.epochs} epochs, {seconds:.1f} s, {propagations:.0f} propagations, "
        f"clean {100 * clean / total:.2f}%, PGD-20 {100 * robust / total:.2f}%"
    )


if __name__ == "__main__":
    main()
