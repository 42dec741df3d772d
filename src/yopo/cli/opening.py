"""The first line of a training: what can be told of it before torch is there.

Torch takes a second or more to come, so images, parameters and device are looked up without it, as
far as they can be; the line after it has them from the training itself.
"""

import os
import re
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from yopo.cli.common import Terminal, rank
from yopo.core import files
from yopo.core.words import fraction
from yopo.methods.registry import ENTRIES, said
from yopo.runs.overlay import Tree
from yopo.runs.sections import L2Config, LinfConfig

PATIENCE = 0.3  # seconds in which pictures are counted
# Training images, classes, channels and side.
SETS = {
    "mnist-subset": (6_000, 10, 1, 28),
    "mnist": (60_000, 10, 1, 28),
    "cifar10": (50_000, 10, 3, 32),
}
# Parameters of the recipes' networks, for images of these channels and side: without the last
# layer, and of the last layer for each class. A test builds them.
NETWORKS: list[tuple[str, Tree, tuple[int, int | None], int, int]] = [
    ("smallcnn", {"width": 16, "hidden": 100}, (1, 28), 77_768, 101),
    ("smallcnn", {}, (1, 28), 310_192, 201),
    ("fitted", {}, (3, 64), 695_056, 129),
    ("preactresnet18", {"final_bn": True}, (3, None), 11_167_040, 513),
    ("preactresnet18", {"final_bn": False}, (3, None), 11_166_016, 513),
    ("wideresnet", {}, (3, None), 46_154_064, 641),
    ("resnet50", {}, (3, None), 23_508_032, 2_049),
]


def first_line(
    what: str, tree: Tree, out: Path, device: str | None, *, methods: str | None = None
) -> None:
    """Say what will be trained, from settings as they are written."""
    if rank() > 0:
        return
    given = (tree.get(key) for key in ("method", "threat", "data", "model"))
    # What is no section will be refused when settings are checked.
    method, threat, data, model = (part if isinstance(part, dict) else {} for part in given)
    words = [methods or _method(method), _threat(threat)]
    images, classes, shape = _data(data)
    counted = [f"{images:,} images"] if images else []
    counted += [f"{classes} classes"] if classes else []
    many = parameters(model, classes, shape)
    words += _named(data, counted) + _named(model, [f"{many:,} parameters"] if many else [])
    words += filter(None, [device or likely_device()])
    Terminal().say(f"{what}: {', '.join(filter(None, words))}; into {out}")


def _method(settings: Tree) -> str:
    whole = {k: int(v) if str(v).isdecimal() else v for k, v in settings.items()}
    name = whole.get("name")
    if not isinstance(name, str):
        return ""
    entry = ENTRIES.get(name)  # its example has the defaults, and needs no torch
    return said(((entry and entry.read(entry.example)) or {}) | whole)


def _threat(settings: Tree) -> str:
    name = str(settings.get("name", "linf"))
    kinds = {"linf": ("L∞", LinfConfig), "l2": ("L2", L2Config)}
    if name not in kinds:
        return ""
    norm, kind = kinds[name]
    eps = settings.get("eps", kind.model_fields["eps"].default)
    return f"{norm} eps {fraction(eps) if isinstance(eps, float) else eps}"


def _named(part: Tree, about: list[str]) -> list[str]:
    if "name" not in part:
        return []
    return [f"{part['name']} ({', '.join(about)})" if about else str(part["name"])]


def _data(data: Tree) -> tuple[int | None, int | None, tuple[int, int | None]]:
    """How many images, of which some are held out; classes; channels and side."""
    name = data.get("name")
    if name in SETS:
        images, classes, *shape = SETS[str(name)]
        return images, classes, (shape[0], shape[1])
    side = str(data.get("size"))
    shape_of_pictures = (3, int(side) if side.isdecimal() else None)
    if name != "folder" or data.get("root") is None:
        return None, None, shape_of_pictures
    try:
        return *_pictures(Path(str(data["root"])).expanduser()), shape_of_pictures
    except OSError:  # what is wrong with it is said when it is read
        return None, None, shape_of_pictures


def _pictures(root: Path) -> tuple[int | None, int | None]:
    """How many are to be trained with, if they can soon be counted, and in how many classes."""
    split = root / "train"
    parted = split.is_dir() and any(f.is_dir() for f in split.iterdir())
    folder = split if parted else root
    classes = [f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")]
    end, count = time.monotonic() + PATIENCE, 0
    for number, _ in enumerate(file for each in classes for file in _files(each)):
        count = number + 1
        if time.monotonic() > end:
            return None, len(classes)
    return count or None, len(classes) or None


def _files(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif not entry.name.startswith("."):
                yield entry.name


def parameters(model: Tree, classes: int | None, shape: tuple[int, int | None]) -> int | None:
    """Of a recipe's own network as it is."""
    if classes is None:
        return None
    options = model.get("options") or {}
    for name, own, (channels, side), body, each in NETWORKS:
        fits = shape[0] == channels and side in (None, shape[1])
        if fits and (model.get("name"), options) == (name, own):
            return body + each * classes
    return None


def likely_device() -> str | None:
    """Where it will train, if torch can use what is there; None where that cannot be told."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        build = files.read_text(Path(spec.origin).with_name("version.py"))
        if not re.search(r"^(cuda|hip|rocm|xpu)\b.*= '", build, re.MULTILINE):
            return "cpu"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        if gpus and not hidden:
            told = re.search(r"^Model:\s*(.+)", files.read_text(gpus[0]), re.MULTILINE)
            return told[1].strip() if told else None
    except (OSError, ValueError):
        pass
    return None
