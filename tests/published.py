"""Run folders with networks of every kind, untrained, and an evaluation of them."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from yopo.core import files, seals, tensor_files
from yopo.core.digest import weights_digest
from yopo.runs.build import build_model
from yopo.runs.overlay import Tree
from yopo.runs.settings import validate

# Settings of a small one of each of our networks, and its images.
NETWORKS: dict[str, tuple[Tree, tuple[int, int, int]]] = {
    "smallcnn": ({"options": {"width": 2, "hidden": 4}}, (1, 28, 28)),
    "preactresnet18": ({"options": {"width": 4}}, (3, 32, 32)),
    "wideresnet": ({"options": {"depth": 10, "width": 1}}, (3, 32, 32)),
    "resnet50": ({"options": {"width": 4, "blocks": [1, 1, 1, 1]}}, (3, 32, 32)),
    "fitted": ({"options": {"width": 16}, "channels_last": True}, (3, 24, 24)),
}
CLASSES = ("cat", "dog", "owl", *"defghij")


def write_network(
    out: Path, name: str, over: Tree | None = None, data: Tree | None = None
) -> nn.Module:
    """A run's folder around one of them, whose BatchNorm has seen something; the network."""
    model, shape = NETWORKS[name]
    tree = validate(
        {
            "model": {"name": name, "normalize": True, **model, **(over or {})},
            "threat": {"eps": 8 / 255},
            "data": data or {"name": "mnist-subset"},
        }
    )
    torch.manual_seed(0)
    x = torch.randint(0, 256, (8, *shape), dtype=torch.uint8)
    with torch.random.fork_rng():
        net = build_model(tree.model, x, len(CLASSES)).float()
        net(x.float() / 255)  # in training mode: running statistics move
    return write_folder(out, net.eval(), tree.tree(), shape)


def write_folder(out: Path, net: nn.Module, tree: Tree, shape: tuple[int, int, int]) -> nn.Module:
    """The folder of a run that ended with this network."""
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(yaml.safe_dump(tree))
    words = {"config": json.dumps(tree), "images": json.dumps({"classes": CLASSES, "shape": shape})}
    tensor_files.save_weights(out / "model.safetensors", dict(net.state_dict()), words)
    return net


def write_evaluation(run: Path, net: nn.Module, over: dict[str, Any] | None = None) -> Tree:
    """What `yopo eval` would have left there, with numbers of our own."""
    weights = run / "model.safetensors"
    found = {"clean": 0.75, "pgd-20": 0.5, "autoattack": 0.4375}
    about = {
        "model": "net (10 parameters, trained with yopo)",
        "data": "cifar10 test set",
        "weights": weights.name,
        "file_sha256": files.file_digest(weights),
        "threat": "L∞, eps = 8/255",
        "eps": 8 / 255,
        "weights_sha256": weights_digest(net),
        "precision": "float32",
        "packages": "torch 2",
        "hardware": "cpu",
        "finished": "2026-01-02 03:04 UTC",
        "images": 10_000,
        "seed": 0,
        "batch": 250,
    }
    values: Tree = {
        "accuracy": found,
        "worst": {"accuracy": 0.4375, "interval": [0.42, 0.45]},
        "attacks": {
            name: {
                "accuracy": share,
                "interval": [share - 0.01, share + 0.01],
                "settings": "standard version" if name == "autoattack" else "",
                "seconds": 1.0,
                "propagations": 1.0,
            }
            for name, share in found.items()
        },
        "warnings": [],
        "about": about | (over or {}),
    }
    seals.write_json(run / "eval.json", values)
    return values
