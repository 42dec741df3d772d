"""What a person sees while a run goes on."""

import time
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from yopo.cli.common import Terminal

QUIET = 60.0  # seconds after which a log without bars gets a line inside an epoch, too


class Screen:
    """Bars on a terminal, plain lines elsewhere; silent in all processes but the first."""

    def __init__(self, title: str, epochs: int, tracker: Any = None, quiet: bool = False) -> None:  # noqa: ANN401
        self.console = Terminal(quiet=quiet)
        self.title, self.epochs, self.tracker = title, epochs, tracker
        self.bars = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )
        self._all = self.bars.add_task(title, total=epochs, note="")
        self._one = self.bars.add_task("epoch", total=1, note="")
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        self._said = time.monotonic()
        self.console.print(text, soft_wrap=True)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """Move the bars."""
        self.bars.update(self._all, completed=epoch + step / steps)
        self.bars.update(self._one, description=f"epoch {epoch + 1}", completed=step, total=steps)
        if note:
            self.bars.update(self._one, note=note)
        if note and self.bars.disable and time.monotonic() - self._said > QUIET:
            self.say(
                f"{self.title} epoch {epoch + 1:>4}/{self.epochs}  step {step}/{steps}  {note}"
            )

    def epoch(self, line: dict[str, Any]) -> None:
        """Say what the epoch showed."""
        shown = f"loss {line['loss']:.3f}  train {line['train_accuracy']:.1%}"
        if "robust" in line:
            shown += f"  held-out clean {line['clean']:.1%}  PGD {line['robust']:.1%}"
            self.bars.update(self._all, note=f"PGD {line['robust']:.1%}")
        when = f"{line['epoch']:>4}/{self.epochs}  {line['train_seconds']:8.1f} s"
        self.say(f"{self.title} epoch {when}  {shown}")
        if self.tracker is not None:
            for key, value in line.items():
                if isinstance(value, int | float) and key != "epoch":
                    self.tracker.add_scalar(key, value, line["epoch"])
