"""What a person sees while a run goes on, or an evaluation."""

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from yopo.cli.common import Terminal
from yopo.runs.folder import TENSORBOARD, refuse_link

QUIET = 60.0  # seconds after which a log without bars gets a line about what is not done yet


class Screen:
    """Bars on a terminal, plain lines elsewhere; silent in all processes but the first.

    It watches a training (`step`, `epoch`) or an evaluation (`attack`). With `track`, the folder of
    a run, TensorBoard's files are written there too.
    """

    def __init__(
        self, title: str = "", epochs: int = 0, *, track: Path | None = None, quiet: bool = False
    ) -> None:
        self.console = Terminal(quiet=quiet)
        self.title, self.epochs, self.track = title, epochs, track
        self.bars = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TextColumn("{task.fields[done]:>9}"),
            TimeElapsedColumn(),
            Remaining(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said = time.monotonic()
        self._tracker: Any = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._said = time.monotonic()
        self.console.print(text, soft_wrap=True)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """A step of a training is done."""
        whole = epoch + step / steps
        self._move(self.title, whole / self.epochs, f"{whole:.0f}/{self.epochs}")
        self._move("epoch", step / steps, f"{step}/{steps}", note, shown=f"epoch {epoch + 1}")
        if note and self._is_due:
            self.say(
                f"{self.title} epoch {epoch + 1:>4}/{self.epochs}  step {step}/{steps}  {note}"
            )

    def epoch(self, line: dict[str, Any]) -> None:
        """Say what an epoch showed."""
        shown = f"loss {line['loss']:.3f}  train {line['train_accuracy']:.1%}"
        if "robust" in line:
            shown += f"  held-out clean {line['clean']:.1%}  PGD {line['robust']:.1%}"
            part, done = line["epoch"] / self.epochs, f"{line['epoch']}/{self.epochs}"
            self._move(self.title, part, done, f"PGD {line['robust']:.1%}")
        when = f"{line['epoch']:>4}/{self.epochs}  {line['train_seconds']:8.1f} s"
        self.say(f"{self.title} epoch {when}  {shown}")
        if self.track is not None:
            self._tracker = self._tracker or _writer(self.track)
            for key, value in line.items():
                if isinstance(value, int | float) and key != "epoch":
                    self._tracker.add_scalar(key, value, line["epoch"])

    def attack(self, name: str, part: float, accuracy: float) -> None:
        """Show how far an attack is, and the accuracy it has left."""
        left = f"{accuracy:.2%} left"
        self._move(name, part, f"{part:.0%}", left)
        if (self.bars.disable and part >= 1) or self._is_due:
            self.say(f"{name:<12} {part:4.0%}  {left}")

    def close(self) -> None:
        """Nothing more will come."""
        if self._tracker is not None:
            self._tracker.close()

    @property
    def _is_due(self) -> bool:
        """Whether a log without bars has heard nothing for long."""
        return self.bars.disable and time.monotonic() - self._said > QUIET

    def _move(
        self, name: str, part: float, done: str, note: str = "", *, shown: str | None = None
    ) -> None:
        if name not in self._tasks:
            self._tasks[name] = self.bars.add_task(name, total=1.0, done="", note="")
        task = self._tasks[name]
        self.bars.update(task, description=shown or name, completed=part, done=done)
        if note:
            self.bars.update(task, note=note)


def check_tracker(run: Path) -> None:
    """Find out before the work whether TensorBoard's files can be written."""
    refuse_link(run / TENSORBOARD)
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise ValueError(
            "--track tensorboard needs it installed: pip install tensorboard"
        ) from None


def _writer(run: Path) -> Any:  # noqa: ANN401
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / TENSORBOARD))
