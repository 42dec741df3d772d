"""Clean images, perturbations and adversarial images, as PNGs inside the page."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from yopo.core import tensor_files
from yopo.core.files import parse_json
from yopo.report.records import Run
from yopo.runs.folder import EVALUATION, SHOWN, EvaluationFiles
from yopo.runs.shown import SAME, choose

LARGEST = 1024  # pixels of a side


@dataclass
class Strip:
    """A few images that an attack broke on one run's network."""

    run: Run
    attack: str
    adversarial: Tensor  # (N, C, H, W), in [0, 1]
    clean: Tensor | None  # the same, where the file has them
    labels: list[str]
    answers: list[str] | None  # to the adversarial images, where the file has them
    before: list[str] | None  # to the clean images, likewise
    same: bool = False  # images that do not depend on the run, broken or not


def read_strips(run: Run) -> list[Strip]:
    """Images that the evaluation's strongest attack broke, and those that all networks are shown.

    No network is built and no data set is read: the evaluation wrote what there is to show.
    """
    file = EvaluationFiles.of(run.folder).examples
    if EVALUATION not in run.evaluations or not file.is_file():
        return []
    facts, tensors = tensor_files.load_metadata(file), tensor_files.load_weights(file)
    result = next((e for e in run.strongest_first if _fits(e, facts, tensors)), None)
    if result is None:
        raise ValueError(f"{file.name} is of another evaluation")
    broken = [a for a in result["attacks"] if tensors.get(f"{a}.labels", torch.empty(0)).numel()]
    strips = []
    if broken:
        attack = min(broken, key=lambda a: (result["attacks"][a]["accuracy"], a))
        strips.append(_strip(run, attack, attack, facts, tensors))
    if SAME in facts and f"{SAME}.labels" in tensors:
        strips.append(_strip(run, SAME, facts[SAME][:40], facts, tensors))
    return strips


def _strip(
    run: Run, key: str, attack: str, facts: dict[str, str], tensors: dict[str, Tensor]
) -> Strip:
    """Those that the file has under a key."""
    parts = ("images", "labels", "clean", "answers", "clean_answers")
    held = {k: t for k in parts if (t := tensors.get(f"{key}.{k}")) is not None}
    file = EvaluationFiles.of(run.folder).examples.name
    names = parse_json(facts.get("names", "[]"), f"the metadata of {file}")
    if not (_well_formed(held) and isinstance(names, list)):
        raise ValueError(f"{file} was edited or is of another version")
    rows = choose(held["labels"])
    held = {k: t[rows] for k, t in held.items()}
    clean = held["clean"].float() / 255 if "clean" in held else None
    labels, answers, before = (
        [str(names[i]) if 0 <= i < len(names) else str(i) for i in held[k].tolist()]
        if k in held
        else None
        for k in ("labels", "answers", "clean_answers")
    )
    images = held["images"].float()
    return Strip(run, attack, images, clean, labels or [], answers, before, key == SAME)


def _fits(e: dict[str, Any], facts: dict[str, str], tensors: dict[str, Tensor]) -> bool:
    """Whether these examples are of that evaluation; files of an earlier version say less."""
    attacks = {key.rpartition(".")[0] for key in tensors if key.endswith(".labels")} - {SAME}
    same = all(
        facts.get(key, str(e["about"].get(key))) == str(e["about"].get(key)) for key in SHOWN
    )
    return same and attacks <= {*e["attacks"]}


def _well_formed(held: dict[str, Tensor]) -> bool:
    """Whether there are images of a bearable size, and one label and answer for each."""
    images, labels = held.get("images"), held["labels"]
    if images is None or images.dim() != 4 or not images.is_floating_point():
        return False
    if not 0 < max(images.shape[2:]) <= LARGEST or 0 in images.shape:
        return False
    whole = (held.get(key, labels) for key in ("labels", "answers", "clean_answers"))
    clean = held.get("clean", images.to(torch.uint8))
    return all(t.shape == images.shape[:1] and t.dtype == torch.long for t in whole) and (
        clean.shape == images.shape and clean.dtype == torch.uint8
    )


def shown(strip: Strip) -> dict[str, Any]:
    """The images one under another, example beside example."""
    eta = None if strip.clean is None else strip.adversarial - strip.clean
    if eta is not None:  # grey is no change; the largest change is black or white
        eta = 0.5 + eta / (2 * eta.abs().max().clamp(min=1e-12))
    figures = []
    for i, label in enumerate(strip.labels):
        images = [_img(strip.adversarial[i], f"{label}, adversarial")]
        if strip.clean is not None and eta is not None:
            images.insert(0, _img(eta[i], "perturbation"))
            images.insert(0, _img(strip.clean[i], f"{label}, clean"))
        answer = strip.answers[i] if strip.answers else None
        first = strip.before[i] if strip.before else label
        wrong = first if first != label and answer is not None else ""
        figures.append({"images": images, "label": label, "answer": answer, "wrong": wrong})
    rows = "the adversarial image"
    if eta is not None:
        rows = (
            "from the top, the clean image, the perturbation (grey is none, the largest is black "
            "or white) and the adversarial image"
        )
    text = f"Images that {strip.attack} broke: {rows}."
    if strip.same:
        return {"figures": figures, "text": f"Under {strip.attack}; {rows}."}
    if eta is None or strip.answers is None:
        text += " An earlier version wrote them; `yopo eval --save-examples` adds what is missing."
    return {"text": text, "figures": figures}


def _img(x: Tensor, alt: str) -> dict[str, str]:
    """An image (C, H, W) in [0, 1] as a PNG; channels beyond three are left out."""
    x = x[:3] if x.shape[0] >= 3 else x[:1]
    x = x.nan_to_num().clamp(0, 1)
    pixels = (x * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "PNG")
    return {"alt": alt, "data": base64.b64encode(buffer.getvalue()).decode()}
