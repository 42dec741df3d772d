"""Trackers of experiments behind one protocol: TensorBoard, Weights & Biases, MLflow, Trackio.

Each is configured as it always is, by its own environment variables. An object of your own with
these four methods is a tracker, too.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Settings = Mapping[str, Any]  # "method.m": 3
PROJECT = "yopo"  # unless the tracker's own variable names another


class Tracker(Protocol):
    """Where a run's numbers and pictures go besides its folder."""

    def start(self, run: Path, name: str, settings: Settings, before: str | None) -> str | None:
        """A run begins, or goes on; return what it is to be called by then, as `before`.

        run: a folder in the run's own, for files. settings: by dotted name.
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by name, after so many epochs."""

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """A picture (H, W, 3), uint8."""

    def end(self, card: str | None) -> None:
        """No more will come for now; the card says in Markdown what was found."""


class TensorBoard:
    """Event files in the run's folder."""

    def start(self, run: Path, name: str, settings: Settings, before: str | None) -> str | None:
        """Another file of events beside those of before."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run))
        if before is None:
            rows = [f"| {key} | {value} |" for key, value in settings.items()]
            self.writer.add_text("settings", "\n".join(["| | |", "|-|-|", *rows]))
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Scalars."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """An image."""
        self.writer.add_image(name, picture, step, dataformats="HWC")

    def end(self, card: str | None) -> None:
        """The card as text."""
        if card is not None:
            self.writer.add_text("card", card)
        self.writer.close()


class Wandb:
    """Weights & Biases; WANDB_PROJECT, WANDB_MODE=offline and the like are heard."""

    def start(self, run: Path, name: str, settings: Settings, before: str | None) -> str | None:
        """A run, or the one of before."""
        import wandb

        run.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        which: dict[str, Any] = {"id": before, "resume": "allow"} if before else {}
        self.run = wandb.init(
            project=project, name=name, dir=str(run), config=dict(settings), **which
        )
        self.run.define_metric("*", step_metric="epoch")  # which may go back after a collapse
        return str(self.run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Over epochs."""
        self.run.log({**values, "epoch": step})

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """An image."""
        import wandb

        self.run.log({name: wandb.Image(picture), "epoch": step})

    def end(self, card: str | None) -> None:
        """The card in the summary."""
        if card is not None:
            self.run.summary["card"] = card
        self.run.finish()


class MLflow:
    """MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are heard."""

    def start(self, run: Path, name: str, settings: Settings, before: str | None) -> str | None:
        """A run of its client, which leaves the process's active run alone."""
        import mlflow

        self.client = mlflow.MlflowClient()
        self.id = before
        if self.id is None:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            there = self.client.get_experiment_by_name(title)
            place = there.experiment_id if there else self.client.create_experiment(title)
            self.id = self.client.create_run(place, run_name=name).info.run_id
            for key, value in settings.items():
                self.client.log_param(self.id, key, value)
        else:
            self.client.update_run(self.id, status="RUNNING")
        return self.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Metrics."""
        for key, value in values.items():
            self.client.log_metric(self.id, key, value, step=step)

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """An artifact."""
        self.client.log_image(self.id, picture, artifact_file=f"{name}-{step}.png")

    def end(self, card: str | None) -> None:
        """The card as an artifact."""
        if card is not None:
            self.client.log_text(self.id, card, "card.md")
        self.client.set_terminated(self.id)


class Trackio:
    """Trackio, on this machine or a Space; TRACKIO_DIR and TRACKIO_SPACE_ID are heard."""

    def start(self, run: Path, name: str, settings: Settings, before: str | None) -> str | None:
        """A run, or the one of before: it knows them by name, so ours has an ending of its own."""
        import trackio

        called = before or f"{name}-{os.urandom(3).hex()}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        quiet = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        resume = "allow" if before else "never"
        self.run = trackio.init(project, called, config=dict(settings), resume=resume, **quiet)
        return called

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Over epochs."""
        self.run.log(dict(values), step=step)

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """An image."""
        import trackio

        self.run.log({name: trackio.Image(picture)}, step=step)

    def end(self, card: str | None) -> None:
        """The card as Markdown."""
        import trackio

        if card is not None:
            self.run.log({"card": trackio.Markdown(card)})
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def named(name: str) -> Tracker:
    """A tracker by name, if its package is there."""
    if name not in TRACKERS:
        raise ValueError(f"no tracker {name!r}; --track knows {', '.join(TRACKERS)}")
    try:
        there = importlib.util.find_spec(name) is not None  # each is called as its package is
    except ValueError:
        there = False
    if not there:
        raise ValueError(f"--track {name} needs it installed: pip install 'yopo-torch[{name}]'")
    return TRACKERS[name]()
