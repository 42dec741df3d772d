"""Clean images, perturbations and adversarial images, as PNGs inside the page."""

import base64
import io
from collections import Counter
from dataclasses import dataclass
from html import escape

import torch
from PIL import Image
from torch import Tensor

from yopo.report.records import Run


@dataclass
class Strip:
    """A few images that an attack broke on one run's network."""

    run: Run
    attack: str
    adversarial: Tensor  # (N, C, H, W), in [0, 1]
    clean: Tensor | None  # the same, where the data set could be read
    labels: list[str]
    guesses: list[str] | None  # on the adversarial images, where the network could be run
    note: str = ""  # what could not be shown, and why


def strip_html(strip: Strip) -> str:
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
        told = f"read as <b>{escape(strip.guesses[i])}</b>" if strip.guesses else "misclassified"
        caption = f"<figcaption>{escape(label)}<br>{told}</figcaption>"
        figures.append(f"<figure>{''.join(images)}{caption}</figure>")
    rows = "the adversarial image"
    if eta is not None:
        rows = (
            "from the top, the clean image, the perturbation (grey is none, the largest is black "
            "or white) and the adversarial image"
        )
    text = f"Images that {strip.attack} broke: {rows}. {strip.note}"
    return f'<p class="small">{escape(text)}</p><div class="strip">{"".join(figures)}</div>'


def choose(labels: Tensor) -> Tensor:
    """Rows of eight images (N,), as many classes as there are, in order."""
    seen: Counter[int] = Counter()
    rank = []
    for label in labels.tolist():
        rank.append(seen[label])
        seen[label] += 1
    order = sorted(range(len(rank)), key=lambda i: rank[i])  # of equal ones the first
    return torch.tensor(sorted(order[:8]), dtype=torch.long)


def _img(x: Tensor, alt: str) -> str:
    """An image (C, H, W) in [0, 1] as an element; channels beyond three are left out."""
    x = x[:3] if x.shape[0] >= 3 else x[:1]
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
