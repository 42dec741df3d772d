"""What a person sees while a run goes on, or an evaluation."""

import time
from dataclasses import dataclass
from typing import Any

from rich import progress
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from yopo.cli.common import Terminal

QUIET = 60.0  # seconds after which a log without bars gets a line about what is not done yet


class Clock(ProgressColumn):
    """The time that a bar has taken, and what is left of it at the mean pace until it last moved.

    What is left is known at that moment alone, and passes since; nothing is said of it when it is
    over and the bar still has not moved.
    """

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """As 1:05, 12:40 to go."""
        ended = task.finished and not task.fields["goes_on"]
        gone = task.finished_time if ended else task.elapsed
        moved = task.completed - task.fields["begun"]  # a resumed run begins in the middle
        if gone is None or task.finished or moved <= 0:
            return Text(f"{_minutes(gone or 0):>7}{'':15}")
        since = task.get_time() - task.fields["moved_at"]
        left = (gone - since) * (1 - task.completed) / moved - since
        to_go = f", {_minutes(left):>7} to go" if left > 0 else " " * 15
        return Text(f"{_minutes(gone):>7}{to_go}")


def _minutes(seconds: float) -> str:
    """As 0:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class Narrow:
    """What leaves room for the ^C that a terminal shows: a line that wraps would be drawn twice."""

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """It, three columns narrower than the terminal."""
        yield from console.render(self.shown, options.update_width(options.max_width - 3))


class Bars(progress.Progress):
    """Bars that stay in their place when Ctrl-C is typed."""

    def get_renderable(self) -> RenderableType:
        """All of them."""
        return Narrow(super().get_renderable())


class Screen:
    """Bars on a terminal, plain lines elsewhere; silent in all processes but the first.

    It watches a training (`begin`, `step`, `epoch`, `attack`) or an evaluation (`attack` alone, a
    bar for each).
    """

    def __init__(self, title: str = "", *, quiet: bool = False) -> None:
        self.console = Terminal(quiet=quiet)
        self.title, self.epochs = title, 0
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[done]}"),
            Clock(Column(no_wrap=True)),  # else what is left over is taken from it, not the bar
            TextColumn("{task.fields[note]}"),
            expand=True,
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )
        self._tasks: dict[str, TaskID] = {}
        self._attack = ""  # the last that was heard of
        self._said = time.monotonic()

    def begin(self, epochs: int) -> None:
        """It is a training, of so many epochs."""
        self.epochs = epochs

    def say(self, text: str, *, words: bool = True) -> None:
        """Print a line; one whose `words` are to be copied has its breaks from the terminal."""
        self._said = time.monotonic()
        if words:
            self.console.say(text)
        else:
            self.console.print(text, soft_wrap=True)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """A step of a training is done."""
        whole = epoch + step / steps  # the count is of epochs that are done
        self._move(self.title, whole / self.epochs, f"{int(whole)}/{self.epochs}")
        self._move("epoch", step / steps, f"{step}/{steps}", note, shown=f"epoch {epoch + 1}")
        if note and self._is_due:
            self.say(
                f"{self.title} epoch {epoch + 1:>4}/{self.epochs}  step {step}/{steps}  {note}"
            )

    def epoch(self, line: dict[str, Any]) -> None:
        """Say what an epoch showed."""
        shown = f"loss {line['loss']:.3f}  train {line['train_accuracy']:.1%}"
        if "robust" in line:
            shown += f"  held-out {line['clean']:.1%}, PGD {line['robust']:.1%}"
            part, done = line["epoch"] / self.epochs, f"{line['epoch']}/{self.epochs}"
            self._move(self.title, part, done, f"PGD {line['robust']:.1%}")
        when = f"{line['epoch']:>4}/{self.epochs}  {line['train_seconds']:6.1f} s"
        self.say(f"{self.title} epoch {when}  {shown}")
        if line["epoch"] < self.epochs:
            self._begin("epoch", f"epoch {line['epoch'] + 1}")
        if "attack" in self._tasks:
            self.bars.update(self._tasks["attack"], visible=False)

    def attack(self, name: str, part: float, accuracy: float) -> None:
        """Show how far an attack is, and the accuracy it has left."""
        left = f"{accuracy:.2%} left"
        key = "attack" if self.epochs else name.partition(":")[0]  # of all its stages
        begins, self._attack = name != self._attack, name
        if self.epochs and begins:  # one bar for all of a training's
            self._begin(key, name, part)  # what it took until here is not known
        self._move(key, part, f"{part:.0%}", left, shown=name)
        if self.bars.disable and begins and part < 1 and not self.epochs:
            self.say(f"{name} begins, {left}")  # the next word may come late
        elif (self.bars.disable and part >= 1 and not self.epochs) or self._is_due:
            self.say(f"{name:<12} {part:4.0%}  {left}")

    @property
    def _is_due(self) -> bool:
        """Whether a log without bars has heard nothing for long."""
        return self.bars.disable and time.monotonic() - self._said > QUIET

    def _move(
        self, name: str, part: float, done: str, note: str = "", *, shown: str | None = None
    ) -> None:
        if name not in self._tasks:
            self._begin(name, shown or name, part)
        task = self._tasks[name]
        now = self.bars.get_time()
        self.bars.update(
            task,
            description=shown or name,
            completed=part,
            done=done,
            moved_at=now,
            visible=True,
        )
        if note:
            self.bars.update(task, note=note)

    def _begin(self, name: str, shown: str, begun: float = 0.0) -> None:
        """Set a bar to where it begins, and its clock to nought."""
        at: dict[str, Any] = {"begun": begun, "done": "", "note": ""}
        at["moved_at"] = self.bars.get_time()
        at["goes_on"] = bool(self.epochs) and name == self.title  # while the test lasts, too
        if name in self._tasks:
            self.bars.reset(self._tasks[name], description=shown, **at)
        else:
            self._tasks[name] = self.bars.add_task(shown, total=1.0, **at)
        self.bars.update(self._tasks[name], completed=begun)
