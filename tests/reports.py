"""Run folders written by hand, and a reader of the report's HTML, for its tests."""

import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import tiny_config
from yopo.runs.overlay import Tree

VOID = {"meta", "img", "br", "link", "input"}


def write_run(
    folder: Path,
    over: Tree | None = None,
    *,
    epochs: int = 4,
    finished: bool = True,
    hardware: str = "one fast GPU",
    robust: float | None = None,  # of 1,000 test images, by the run and in the evaluation
    warnings: list[dict[str, str]] | None = None,
    evaluated: bool = True,
) -> Path:
    """A run of made-up numbers, all different."""
    rng = random.Random(folder.name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tiny_config(over).tree()))
    seconds, spent, lines = 0.0, 0.0, []
    pace, cost = rng.uniform(5, 20), rng.uniform(0.2, 0.3)  # of a quiet machine
    for epoch in range(1, epochs + 1):
        seconds, spent = seconds + pace, spent + cost * pace
        line = {"epoch": epoch, "train_seconds": seconds, "propagations": spent, "loss": 1.0}
        lines.append(line | {"clean": rng.random(), "robust": rng.random(), "images": 20})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not finished:
        return folder
    share = rng.randrange(1000) / 1000 if robust is None else robust
    result = {
        "last": {"clean": rng.randrange(1000) / 1000, "pgd-3": rng.randrange(1000) / 1000},
        "best": {"clean": rng.randrange(1000) / 1000, "pgd-3": share},
        **{"best_epoch": 2, "train_seconds": seconds, "propagations": spent, "test_images": 1000},
        "environment": {"hardware": hardware, "packages": "torch 9.9"},
    }
    (folder / "result.json").write_text(json.dumps(result))
    if evaluated:
        found = evaluation(rng, share) | {"warnings": warnings or []}
        (folder / "eval.json").write_text(json.dumps(found))
    return folder


def evaluation(rng: random.Random, worst: float) -> dict[str, Any]:
    def attack() -> dict[str, Any]:
        at = rng.uniform(0.1, 0.9)
        interval = [at - rng.uniform(0.01, 0.1), at + rng.uniform(0.01, 0.1)]
        cost = {"seconds": rng.uniform(1, 99), "propagations": rng.uniform(1, 99)}
        return {"accuracy": at, "interval": interval, "settings": "20 steps", **cost}

    about = {"data": "tiny test set", "images": 1000, "threat": "L∞, eps = 0.1", "eps": 0.1}
    about |= {"weights": "model.safetensors", "weights_sha256": "ab" * 32, "precision": "float32"}
    about |= {"seed": 0, "batch": 250, "model": "smallcnn", "packages": "torch 9.9"}
    about |= {"commit": None, "hardware": "one slow CPU", "finished": "2030-01-01"}
    return {
        "attacks": {name: attack() for name in ("clean", "pgd-40", "cw")},
        "worst": {"accuracy": worst, "interval": [worst - 0.03, worst + 0.03]},
        "about": about,
    }


def closer(folder: Path, counts: list[list[int]]) -> Path:
    """The run's evaluation with classes, a confusion and other radii."""
    found = json.loads((folder / "eval.json").read_text())
    classes = [
        {"name": f"class {i}", "images": sum(row), "clean": sum(row), "worst": row[i]}
        for i, row in enumerate(counts)
    ]
    radii = {"attack": "pgd-10", "eps": [0.05, 0.1], "accuracy": [0.8, 0.4]}
    found |= {"classes": classes, "confusion": counts, "radii": radii}
    (folder / "eval.json").write_text(json.dumps(found))
    return folder


class Page(HTMLParser):
    """Elements with their attributes, tables as rows of words; tags must balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {k: v or "" for k, v in attrs}
        self.elements.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":  # several of a class are put one under another
            self._rows = self.tables.setdefault(found["class"], [])
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
        if tag == "small" and {"td", "th"} & set(self.open):
            self._rows[-1][-1] += " "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)
        if self.open and {"td", "th"} & set(self.open):
            self._rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, tag: str, **attrs: str) -> list[dict[str, str]]:
        """Attributes of the elements of that tag with these attributes."""
        return [a for t, a in self.elements if t == tag and attrs.items() <= a.items()]
