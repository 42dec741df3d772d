"""What run folders say: settings, epochs, results, evaluations."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from yopo.attacks.names import parse
from yopo.core.files import file_digest
from yopo.core.threat import L2, Linf
from yopo.evaluation.card import attacked, norm
from yopo.methods import registry
from yopo.runs.folder import (
    BEST,
    CONFIG,
    EVALUATIONS,
    LAST,
    evaluations_in,
    is_finished,
    is_run,
    read_config,
    read_evaluation,
    read_lines,
    read_result,
    runs_in,
)
from yopo.runs.settings import validate

TIMED = "The recipe's first epochs, for their time"  # how the notes of such a run begin
# Settings that say nothing about what is trained, and how fast.
FREE = ("seed", "evaluate", "checkpoint", "diagnose", "notes")


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """With the settings that an older file leaves out."""
    try:
        tree = validate(config).tree()
    except ValueError:  # of another version
        return config
    tree["data"]["resident"] = tree["data"]["resident"] is not False  # left open: as far as it fits
    return tree


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, read."""

    name: str
    folder: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]]  # of the metrics
    result: dict[str, Any] | None
    evaluations: dict[str, dict[str, Any]]  # by file name
    torn: bool = False  # the last line of the metrics is cut off

    @property
    def method(self) -> str:
        """As the paper writes it: YOPO-5-3."""
        return registry.said(self.config["method"])

    @property
    def label(self) -> str:
        """The name, with the method where the name does not say it."""
        same = self.name.lower().replace(" ", "-") == self.method.lower().replace(" ", "-")
        return self.method if same else f"{self.name} ({self.method})"

    @cached_property
    def trained_with(self) -> str:
        """All settings that say what is trained, and how fast; the same of its other seeds."""
        what = {k: v for k, v in filled(self.config).items() if k not in FREE}
        return json.dumps(what, sort_keys=True, default=str)

    @property
    def points(self) -> list[dict[str, Any]]:
        """Epochs that were evaluated in full.

        Those between are looked at with fewer images, for the guard; a collapsed one may have none.
        """
        drawn = ("robust", "clean", "images", "train_seconds", "propagations")
        measured = [line for line in self.lines if all(line.get(k) is not None for k in drawn)]
        most = max((line["images"] for line in measured), default=0)
        return [line for line in measured if line["images"] == most]

    def spent(self, what: str) -> float | None:
        """`train_seconds` or `propagations` in all, so far."""
        last = self.result or (self.lines[-1] if self.lines else {})
        return last.get(what)

    @property
    def own(self) -> tuple[str, dict[str, float]]:
        """What the run itself measured on the test set, with its best weights if it kept some."""
        for which in ("best", "last"):
            if self.result and which in self.result:
                return which, self.result[which]
        return "last", {}

    @property
    def strongest_first(self) -> list[dict[str, Any]]:
        """The evaluations, the strongest first; those of weights that are gone come last."""

        def order(e: dict[str, Any]) -> tuple[bool, Strength]:
            return bool(self.weights(e)), strength(self.config, e)

        return sorted(self.evaluations.values(), key=order, reverse=True)

    @property
    def shared(self) -> bool:
        """Trained beside other runs on its GPU, so that its times say nothing."""
        return not (self.result or {}).get("timed", True)

    @property
    def short(self) -> bool:
        """Trained for its time alone, as `yopo reproduce --epochs` does, and hardly attacked."""
        return str(self.config.get("notes")).startswith(TIMED)

    @property
    def threat(self) -> str:
        """What the run itself is measured with, in words."""
        name, eps = self.config["threat"]["name"], float(self.config["threat"]["eps"])
        return norm(L2(eps) if name == "l2" else Linf(eps))

    @property
    def data(self) -> str:
        """The data set, with the name of its file or folder where it is the user's own."""
        data = self.config["data"]
        own = data.get({"npz": "path", "folder": "root"}.get(data["name"], ""))
        return f"{data['name']} {Path(own).name}" if own else str(data["name"])

    def same_data(self, sha256: str | None) -> tuple[str, ...]:
        """What two runs must have in common for their images to be the same.

        sha256: of the images, where all runs know it; those of data sets with a name need none.
        """
        data = self.config["data"]
        if data["name"] not in ("npz", "folder"):
            return (data["name"],)
        if sha256 is not None:
            return (sha256,)
        return tuple(str(data.get(key)) for key in ("name", "path", "root", "size"))

    @property
    def environment(self) -> dict[str, Any]:
        """Where it was trained, if the run says so."""
        environment: dict[str, Any] = (self.result or {}).get("environment", {})
        return environment

    def weights(self, evaluation: dict[str, Any]) -> list[str]:
        """Which of its weights were evaluated: best, last, both if they are the same, or a file.

        Empty, if they were replaced since, as by going on with the run.
        """
        about = evaluation["about"]
        file = str(about["weights"])
        names = {BEST: ["best", "last"], LAST: ["last", "best"]}.get(file, [])
        digests = (self.result or {}).get("weights_sha256")
        if names and digests and "weights_sha256" in about:
            return [n for n in names if digests.get(n) == about["weights_sha256"]]
        if names and self.result is None and self._gone_on(file, about):
            return []
        same = self.result and self.result["best_epoch"] == self.config["epochs"]
        return (names if same else names[:1]) or [file]

    def _gone_on(self, file: str, about: dict[str, Any]) -> bool:
        """Whether the run, unfinished, wrote other weights since these were evaluated."""
        path, then = self.folder / file, about.get("file_sha256")
        return then is not None and path.is_file() and file_digest(path) != then


class Strength(NamedTuple):
    """By which one evaluation of the same weights leads another."""

    own_radius: bool  # attacked at the radius that it was trained for
    steps: int  # of all attacks; AutoAttack's stages count as more than any PGD
    images: int


def strength(config: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Strength:
    """How hard an evaluation tried, whatever it found."""
    about, steps = evaluation["about"], 0
    for name in evaluation["attacks"]:
        with suppress(ValueError):  # the caller's own attack may do anything
            attack = parse(name)
            steps += attack.steps * attack.restarts + 10_000 * len(attack.stages)
    own = isclose(about["eps"], float(config["threat"]["eps"]), rel_tol=1e-3)
    return Strength(own, steps, about["images"])


def read_runs(folders: list[Path]) -> list[Run]:
    """Read each folder; runs of the same name are told apart by the folders they lie in."""
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"expected each run once, got {folder} twice; leave one out")
    return [_read(f, name) for f, name in zip(folders, _names(resolved), strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    names: list[str] = []
    for folder in folders:
        parts = 1
        while sum(f.parts[-parts:] == folder.parts[-parts:] for f in folders) > 1:
            parts += 1
        names.append("/".join(folder.parts[-parts:]))
    return names


def _read(folder: Path, name: str) -> Run:
    if not is_run(folder):
        inside = runs_in(folder)
        fix = f"did you mean {folder}/{inside[0].name}?" if inside else "check the path"
        raise ValueError(f"expected a run folder with {CONFIG}, got {folder}; {fix}")
    lines, torn = read_lines(folder)
    run = Run(
        name,
        folder,
        read_config(folder),
        lines,
        read_result(folder) if is_finished(folder) else None,
        {},
        torn,
    )
    written = {path.name: read_evaluation(path) for path in evaluations_in(folder)}
    # An evaluation that was set aside, of weights that are gone, is history; one without an attack
    # says nothing of robustness.
    counted = {
        file: e
        for file, e in written.items()
        if (file in EVALUATIONS or run.weights(e)) and (attacked(e["attacks"]) or "radii" in e)
    }
    return replace(run, evaluations=counted)
