"""What the engine gains: plain steps beside captured ones, on random images.

    python -m benchmarks.plain_steps --methods natural,yopo-5-3,pgd-10 --json plain.json

Several processes run plain steps, so this is what they lose.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch

from yopo.bench.bench import _times
from yopo.engine.engine import Engine
from yopo.models import preactresnet18
from yopo.runs.build import build_method
from yopo.runs.recipes import method_tree
from yopo.runs.settings import validate


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="natural,yopo-5-3,pgd-10")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.rand(args.batch, 3, 32, 32, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (args.batch,), device=device)
    found: dict[str, dict[str, float]] = {}
    for spec in args.methods.split(","):
        found[spec] = {}
        for name, fast in (("plain", False), ("captured", True)):
            torch.manual_seed(0)
            net = preactresnet18(width=args.width).to(device)
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)
            method = build_method(validate({"method": method_tree(spec)}), net, optimizer)
            engine = Engine(method, optimizer, precision="bf16", compile=fast, capture=fast)
            engine.prepare(x, y)
            times = _times(partial(engine.step, x, y), device, 2.0)
            found[spec][name] = statistics.median(times)
        print(spec, *(f"{name} {ms:.2f} ms" for name, ms in found[spec].items()), flush=True)
    if args.json:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        about = {"device": where, "torch": torch.__version__, "batch": args.batch}
        args.json.write_text(json.dumps(about | {"milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
