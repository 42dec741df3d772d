"""What `evaluate_run` is made of: which images, which ball, and what is written of the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from yopo.attacks.names import parse_all
from yopo.core import files, seals
from yopo.core.crew import Crew
from yopo.core.threat import L2, Linf
from yopo.data.source import Pictures, Rows
from yopo.evaluation.result import Result
from yopo.evaluation.suite import check_norm
from yopo.evaluation.warnings import Suspicion
from yopo.runs.borrowed import borrow
from yopo.runs.build import build_threat
from yopo.runs.distributed import start
from yopo.runs.folder import WEIGHTS, EvaluationFiles, read_evaluation, read_result
from yopo.runs.hub import local
from yopo.runs.overlay import Tree
from yopo.runs.saved import Saved, find
from yopo.runs.settings import Config

OTHER_WEIGHTS = (
    "{} does not hold the weights that the run's own result names: the file was exchanged, so the "
    "run's settings may say nothing of this network"
)
OTHER_IMAGES = (
    "these are not the test images that the run set aside when it was trained: files were added, "
    "renamed, removed or changed, or the data are others. Where they come from the same pictures, "
    "some may have been trained on"
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found, and where it stands."""

    result: Result
    files: EvaluationFiles
    aside: Path | None  # where the evaluation before is now, if this one does not cover it


def check(
    run: Path,
    attacks: str | Sequence[str],
    *,
    weights: str | None = None,
    eps: float | None = None,
    trust: bool = False,
    model_name: str | None = None,
    data_root: Path | None = None,
    data_path: Path | None = None,
    settings: Tree | None = None,
) -> Saved:
    """The network of a run, if attacks on it may begin; else a ValueError."""
    chosen = parse_all(attacks)
    places = {"data_root": data_root, "data_path": data_path}
    if settings is None:
        saved = find(local(run), weights, trust=trust, model_name=model_name, **places)
    else:
        saved = borrow(run, settings)
    for attack in chosen:
        check_norm(attack, choose_threat(saved.config, eps))
    return saved


def choose_threat(config: Config, eps: float | None = None) -> Linf | L2:
    """The run's own threat, or one of another radius."""
    threat = build_threat(config.threat)
    return threat if eps is None else type(threat)(eps)


def choose_images(test: Pictures, samples: int | None, seed: int) -> tuple[Pictures, str]:
    """All images, or some drawn at random: data sets may be sorted by class."""
    n = len(test)
    if samples is None:
        return test, ""
    if not 1 <= samples <= n:
        raise ValueError(
            f"expected --samples from 1 to {n}, the test images there are, got {samples}"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    rows = order[:samples].sort().values
    return Rows(test, rows), f", drawn from {n:,} with seed {seed}"


def words(saved: Saved, model: nn.Module, drawn: str) -> dict[str, str]:
    """What a card says of the network and its images."""
    config, parameters = saved.config, sum(p.numel() for p in model.parameters())
    origin = f"trained with {config.method.name}" if saved.state is None else "trained elsewhere"
    return {
        "model": f"{config.model.name} ({parameters:,} parameters, {origin})",
        "data": f"{config.data.name} test set{drawn}",
        "weights": saved.weights.name + (f", its {saved.entry}" if saved.entry else ""),
        "file_sha256": files.file_digest(saved.weights),
    }


def crew_on(device: torch.device) -> Crew:
    """The processes that torchrun started, with that device in this one; met now, if not before."""
    start(device)
    return Crew.of_group()


def doubted(result: Result, run: Path, saved: Saved, *, whole: bool) -> Result:
    """With warnings, where weights or test images are not those that the run's result names.

    whole: all test images were attacked.
    """
    try:
        told = read_result(run)
    except (OSError, ValueError):  # a file of weights, a run that is not finished
        return result
    which = next((w for w, name in WEIGHTS.items() if name == saved.weights.name), "")
    wrote, aside = told.get("weights_sha256", {}).get(which), told.get("test_sha256")
    doubts = []
    if wrote not in (None, result.about["weights_sha256"]):
        doubts.append(Suspicion("other-weights", OTHER_WEIGHTS.format(saved.weights.name)))
    if whole and aside not in (None, "", result.about["images_sha256"]):
        doubts.append(Suspicion("other-images", OTHER_IMAGES))
    return replace(result, warnings=[*result.warnings, *doubts])


def write(
    written: EvaluationFiles, result: Result, run: Path, more: Mapping[str, Any], crew: Crew
) -> Evaluation:
    """The first process writes the values and the card; only then all forget finished batches."""
    aside = None
    with crew.all_or_none():
        if crew.rank == 0:
            aside = set_aside(written, result, run)
            seals.write_json(written.values, {**result.to_dict(), **more})
            files.write_text(written.card, result.card())
    result.forget()
    return Evaluation(result, written, aside)


def set_aside(files: EvaluationFiles, result: Result, run: Path) -> Path | None:
    """Rename the evaluation before, unless the new one covers it or its weights were replaced."""
    new = result.about
    try:
        old = read_evaluation(files.values)
        about, when, sha = old["about"], old["about"]["finished"], old["about"]["weights_sha256"]
        alike = all(about[key] == new[key] for key in ("threat", "eps", "seed", "precision"))
        if about["images"] == new["images"]:  # of the same data, and not of others
            alike = alike and about["images_sha256"] == new["images_sha256"]
        attacks = {n: a["settings"] for n, a in old["attacks"].items() if n != "clean"}
        covered = attacks.items() <= new["settings"].items() and about["images"] <= new["images"]
    except (OSError, ValueError):
        return None
    same = sha == new["weights_sha256"]
    if (same and alike and covered) or (not same and sha not in _weights_of(run)):
        return None
    return files.set_aside(when)


def _weights_of(run: Path) -> list[str]:
    """Digests of the weights that a run folder holds."""
    try:
        return list(read_result(run).get("weights_sha256", {}).values())
    except (OSError, ValueError):
        return []
