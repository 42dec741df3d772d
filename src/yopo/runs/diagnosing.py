"""`diagnose_run`: what the co-states of a trained network say about m, n and the split."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from yopo.core import seals
from yopo.pmp.diagnose import diagnose
from yopo.runs.build import build_threat
from yopo.runs.distributed import pick_device
from yopo.runs.folder import DIAGNOSIS, check_writable
from yopo.runs.overlay import Tree
from yopo.runs.saved import find, load_data, load_model


def diagnose_run(
    run: Path,
    *,
    weights: str = "best",
    images: int = 100,
    splits: Sequence[str] | None = None,
    m: int = 8,
    seed: int = 0,
    device: str | None = None,
    trust: bool = False,
    model_name: str | None = None,
    data_root: Path | None = None,
    data_path: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Tree:
    """Study the network of a run folder on training images drawn with `seed`; write what is found.

    weights: "best" or "last". splits: modules where f0 may end; chosen by default. m: the largest
    to try. trust, model_name, data_root, data_path: see `yopo.runs.saved.find`.
    say: called with what is looked at, and as each part of it begins.
    """
    if not run.is_dir():
        raise ValueError(f"expected the folder of a run, got {run}")
    if images < 2:
        raise ValueError(f"expected --images of at least 2, got {images}")
    check_writable(run)
    whose = {"data_root": data_root, "data_path": data_path}
    saved = find(run, weights, trust=trust, model_name=model_name, **whose)
    target, data = pick_device(device), load_data(saved)
    model = load_model(saved, data)
    pictures = data.pictures
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
    chosen = order[:images]
    say(f"looking at {len(chosen)} training images with {saved.weights}, on {target}")
    study: Tree = diagnose(
        model.to(target),
        pictures.read(chosen).to(target) / 255,
        pictures.labels[chosen].to(target),
        build_threat(saved.config.threat),
        splits=splits,
        m=m,
        generator=torch.Generator(target).manual_seed(seed),
        say=say,
    ).tree()
    settings = {"images": len(chosen), "seed": seed, "weights": saved.weights.name}
    head = {"settings": settings, "threat": saved.config.threat.model_dump()}
    seals.write_json(run / DIAGNOSIS, head | study)
    return study
