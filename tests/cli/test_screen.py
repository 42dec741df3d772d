"""What a person sees while a run goes on."""

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from yopo.cli.common import fitted
from yopo.cli.screen import Screen


class Shown:
    """A screen on a terminal, and a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int = 80) -> None:
        self.now = 0.0
        monkeypatch.setenv("COLUMNS", str(width))
        self.screen = Screen("yopo")
        self.screen.begin(3)
        self.screen.bars.get_time = lambda: self.now
        self.width = width

    def lines(self) -> list[str]:
        file = io.StringIO()
        console = Console(file=file, width=self.width)
        console.print(self.screen.bars.get_renderable())
        drawn = file.getvalue().splitlines()
        assert all(len(line) <= self.width - 3 for line in drawn)  # room for ^C, else it wraps
        return [" ".join(re.sub("[━╸╺]+", "", x).split()) for x in drawn]


@pytest.fixture(params=[80, 100])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch, request.param)


def train(shown: Shown, epoch: int, steps: range) -> None:
    """Steps of a second each."""
    for step in steps:
        shown.now += 1
        shown.screen.step(epoch, step, 10, f"loss {step / 10:.3f}")


def test_clock_count_and_loss_are_right_in_every_epoch(shown: Shown) -> None:
    train(shown, 0, range(1, 11))
    shown.now += 5
    line = {"epoch": 1, "train_seconds": 10.0, "loss": 1.0, "train_accuracy": 0.5}
    shown.screen.epoch(line | {"clean": 0.5, "robust": 0.25})
    train(shown, 1, range(1, 6))
    whole, inner = shown.lines()
    # 19 of the 20 seconds since the first step were for 14 of 30 steps; 15 are left
    assert whole == f"yopo 1/3 0:19, 0:{round(19 / 14 * 15)} to go PGD 25.0%"
    assert inner == "epoch 2 5/10 0:05, 0:05 to go loss 0.500"
    train(shown, 1, range(6, 11))
    shown.now += 7
    whole, inner = shown.lines()
    assert whole.startswith("yopo 2/3 0:31, ")  # goes on
    assert inner == "epoch 2 10/10 0:10 loss 1.000"


def test_a_resumed_run_is_not_thought_to_be_quick(shown: Shown) -> None:
    train(shown, 1, range(6, 9))
    whole, inner = shown.lines()
    assert whole.startswith("yopo 1/3 0:02, 0:12 to go")
    assert inner == "epoch 2 8/10 0:02, 0:02 to go loss 0.800"


def test_attacks_on_images_kept_aside_are_seen(shown: Shown) -> None:
    train(shown, 2, range(1, 11))
    shown.screen.attack("test pgd-20", 0.25, 0.9)
    assert shown.lines()[-1] == "test pgd-20 25% 0:00 90.00% left"
    shown.now += 30
    shown.screen.attack("test pgd-20", 0.5, 0.8)
    assert shown.lines()[-1] == "test pgd-20 50% 0:30, 1:00 to go 80.00% left"
    shown.screen.attack("held-out clean", 0.5, 0.7)
    assert len(shown.lines()) == 3
    assert "0:00" in shown.lines()[-1]


@pytest.mark.parametrize("title", ["yopo", "trades-yopo-3-4"])
def test_each_bar_is_one_line_and_still_a_bar(
    title: str, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown.screen.title = title
    shown.screen.begin(105)
    shown.screen.step(0, 0, 469, "")
    shown.now += 3600
    shown.screen.step(0, 469, 469, "loss 12.345")
    line = {"epoch": 1, "train_seconds": 10.0, "loss": 1.0, "train_accuracy": 0.5}
    shown.screen.epoch(line | {"clean": 0.5, "robust": 0.25})
    shown.now += 11
    shown.screen.step(1, 200, 469, "loss 12.345")
    shown.screen.attack("held-out pgd-20", 0.0, 1.0)
    shown.now += 11
    shown.screen.attack("held-out pgd-20", 0.5, 0.9)
    file = io.StringIO()
    console = Console(file=file, width=shown.width, force_terminal=True, color_system="standard")
    console.print(shown.screen.bars.get_renderable())
    drawn = re.sub("\x1b[^m]*m", "", file.getvalue()).splitlines()
    assert [re.sub("[━╸╺]+", "", " ".join(line.split())) for line in drawn] == [
        f"{title}  1/105 1:00:22, 72:49:43 to go PGD 25.0%",
        "epoch 2  200/469 0:22, 0:04 to go loss 12.345",
        "held-out pgd-20  50% 0:11, 0:11 to go 90.00% left",
    ]
    assert all(len(re.sub("[^━╸╺]", "", line)) >= 15 for line in drawn)


def test_what_is_left_passes_while_nothing_is_heard(shown: Shown) -> None:
    shown.screen.epochs = 0  # an evaluation
    shown.screen.attack("autoattack: apgd-ce", 0.0, 0.9)
    shown.now += 30
    shown.screen.attack("autoattack: apgd-t", 0.25, 0.8)
    for wait, left in ((0, ", 1:30 to go"), (60, ", 0:30 to go"), (40, ""), (300, "")):
        shown.now += wait
        minutes, seconds = divmod(round(shown.now), 60)
        (line,) = shown.lines()
        assert line == f"autoattack: apgd-t 25% {minutes}:{seconds:02}{left} 80.00% left"


def test_a_log_of_an_evaluation_says_what_begins(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.attack("clean", 1.0, 0.9)
    for name, parts in (("apgd-ce", (0.0, 0.1, 0.25)), ("apgd-t", (0.25, 0.3))):
        for part in parts:
            screen.attack(f"autoattack: {name}", part, 0.8)
    screen.attack("autoattack", 1.0, 0.7)
    assert capsys.readouterr().out.splitlines() == [
        "clean        100%  90.00% left",
        "autoattack: apgd-ce begins, 80.00% left",
        "autoattack: apgd-t begins, 80.00% left",
        "autoattack   100%  70.00% left",
    ]


def test_a_log_hears_of_attacks_that_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen("yopo")
    screen.begin(3)
    screen.attack("test pgd-20", 1.0, 0.8)
    assert not capsys.readouterr().out
    monkeypatch.setattr("yopo.cli.screen.QUIET", 0.0)
    screen.attack("test pgd-20", 0.5, 0.8)
    assert capsys.readouterr().out == "test pgd-20   50%  80.00% left\n"


def test_words_stay_whole_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, file = Screen("trades-yopo-3-4"), io.StringIO()
    screen.console.file = file
    screen.console._force_terminal = True
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(screen.console), "width", 80)
    words = "collapse: the loss is not finite. Back to the end of epoch 3, learning rate times 0.5"
    screen.say(f"{words} (rollback 1 of 5)")
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert " ".join(line.strip() for line in lines) == f"{words} (rollback 1 of 5)"


@pytest.mark.parametrize("width", [80, 60, 30])
def test_tables_have_no_break_inside_a_word(width: int) -> None:
    def table() -> Table:
        made = Table(caption="training: time spent processing batches")
        for name in ("run", "training", "propagations", "clean", "pgd-20", "worst case"):
            made.add_column(name, overflow="fold")
        made.add_row("first (YOPO-5-3)", "4.4 min", "455", "85.74%", "42.27%", "41.66%")
        return made

    def words(wide: int, shown: Table) -> list[str]:
        file = io.StringIO()
        Console(file=file, width=wide).print(shown)
        assert max(map(len, file.getvalue().splitlines())) <= wide
        return sorted(set(re.findall(r"[\w%().-]+", file.getvalue())))

    assert words(width, fitted(table(), width)) == words(200, table())
