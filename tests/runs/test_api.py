"""Training, comparing and evaluating as functions, as a user of the library calls them."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import BASE, Silent, tiny_data
from yopo.runs.api import (
    compare_runs,
    configure,
    evaluate_run,
    measure_cost,
    method_configs,
    train_run,
)
from yopo.runs.folder import read_evaluation, read_result
from yopo.runs.overlay import Tree, overlay
from yopo.runs.progress import StopRequested
from yopo.runs.settings import Config

pytestmark = pytest.mark.usefixtures("float32")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Settings of a run that takes a second."""
    data, path = tiny_data(), tmp_path_factory.mktemp("data") / "tiny.npz"
    names = ("x_train", "y_train", "x_test", "y_test")
    np.savez(path, **{name: getattr(data, name).numpy() for name in names})
    tiny = {k: v for k, v in BASE.items() if k not in ("checkpoint", "schedule", "ema")}
    return overlay(tiny, {"data": {"name": "npz", "path": str(path)}, "epochs": 2})


@pytest.fixture
def config(tree: Tree) -> Config:
    return configure("demo", tree)


def test_a_run_is_trained_and_evaluated(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, watch, seen = tmp_path / "run", Silent(), list[float]()
    result = train_run(config, out, watch=watch, device="cpu")
    assert [line["epoch"] for line in watch.lines] == [1, 2]
    assert read_result(out) == result
    found = evaluate_run(
        out,
        ["clean", "pgd-2"],
        weights="last",
        samples=30,
        eps=0.05,
        device="cpu",
        progress=lambda _attack, part, _accuracy: seen.append(part),
        show=lambda result: seen.append(result.worst),
    )
    assert found.aside is None
    assert seen[-1] == found.result.worst
    assert 1.0 in seen[:-1]
    told = read_evaluation(found.files.values)
    assert told["about"]["eps"] == 0.05
    assert told["about"]["images"] == 30
    assert told["attacks"]["pgd-2"]["accuracy"] == found.result.accuracy["pgd-2"]
    assert "**clean**" in found.files.card.read_text() or "clean" in found.files.card.read_text()
    less = evaluate_run(out, "clean", samples=10, device="cpu")
    assert less.aside is not None
    assert read_evaluation(less.aside) == told
    assert capsys.readouterr().out == ""  # nothing prints but the command line


def test_methods_are_compared_and_finished_runs_are_not_trained_again(
    tree: Tree, tmp_path: Path
) -> None:
    given = {k: v for k, v in tree.items() if k not in ("method", "epochs")}
    configs = method_configs("demo", ["natural", "pgd-2"], given, most=6)
    epochs = {name: c.epochs for name, c in configs.items()}
    assert epochs == {"natural": 6, "pgd-2": 2}  # of 1 and 7/3 propagations
    opened: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[Silent]:
        opened.append(name)
        yield Silent()

    results = compare_runs(configs, tmp_path, device="cpu", watch=watch)
    assert [*results] == opened == ["natural", "pgd-2"]
    assert all(read_result(tmp_path / name) == result for name, result in results.items())
    with pytest.raises(ValueError, match="holds a run; add --resume"):
        compare_runs(configs, tmp_path, device="cpu")
    assert compare_runs(configs, tmp_path, resume=True, device="cpu") == results
    other = {name: c.model_copy(update={"seed": 9}) for name, c in configs.items()}
    with pytest.raises(ValueError, match=r"another configuration \(seed\)"):
        compare_runs(other, tmp_path, resume=True, device="cpu")


class Interrupting(Silent):
    """Sends this process a signal in its second epoch."""

    def epoch(self, line: dict[str, Any]) -> None:
        super().epoch(line)
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_saves_and_the_same_call_goes_on(config: Config, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopRequested) as stopped:
        train_run(config, tmp_path / "run", watch=Interrupting(), device="cpu")
    assert stopped.value.saved
    assert signal.getsignal(signal.SIGTERM) is before
    watch = Silent()
    train_run(config, tmp_path / "run", resume=True, watch=watch, device="cpu")
    assert "going on from epoch 2, step 0" in watch.said
    with pytest.raises(ValueError, match="holds a run; add --resume"):
        train_run(config, tmp_path / "run", device="cpu")


class Called(Silent):
    """Remembers the order of its calls; asks to stop in the attack that is wanted."""

    def __init__(self, stop_in: str = "") -> None:
        super().__init__()
        self.stop_in, self.calls = stop_in, list[tuple[Any, ...]]()

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        self.calls.append(("step", epoch, step, steps))

    def attack(self, name: str, part: float, accuracy: float) -> None:
        self.calls.append(("attack", name))
        if self.stop_in and name.startswith(self.stop_in):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("stop_in", "epoch"), [("held-out", 0), ("test", 1)])
def test_where_a_resumed_run_is_comes_before_its_attack(
    stop_in: str, epoch: int, config: Config, tmp_path: Path
) -> None:
    with pytest.raises(StopRequested):
        train_run(config, tmp_path / "run", watch=Called(stop_in), device="cpu")
    watch = Called()
    train_run(config, tmp_path / "run", resume=True, watch=watch, device="cpu")
    (kind, *where, step, steps), (then, name) = watch.calls[:2]
    assert (kind, where, step) == ("step", [epoch], steps)
    assert then == "attack"
    assert name.startswith(stop_in)


def test_a_run_in_another_thread_leaves_signals_alone(config: Config, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    found: list[Tree] = []
    thread = threading.Thread(
        target=lambda: found.append(train_run(config, tmp_path / "run", device="cpu"))
    )
    thread.start()
    thread.join()
    assert "last" in found[0]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_watcher_pythons_log_hears_of_it(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "yopo"):
        train_run(config, tmp_path / "run", resume=True, device="cpu")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"nothing to resume in {tmp_path / 'run'}; starting"
    assert sum("train_accuracy" in text for text in said) == 2


def test_a_cost_is_measured_and_nothing_is_kept(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cost = measure_cost(config, "cpu")
    assert cost.steps == 5
    assert cost.seconds > 0
    assert cost.propagations == pytest.approx(config.epochs * (2 + 2 / 3))
    assert not [*tmp_path.iterdir()]


def test_an_evaluation_does_not_go_on_through_a_link(config: Config, tmp_path: Path) -> None:
    train_run(config, tmp_path / "run", device="cpu")
    (tmp_path / "mine").mkdir()
    (tmp_path / "run" / "eval-state").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="eval-state is a link, and nothing of a run is written"):
        evaluate_run(tmp_path / "run", "pgd-1", samples=5, device="cpu")
    assert not [*(tmp_path / "mine").iterdir()]


def test_the_functions_need_no_command_line() -> None:
    """They are below it: neither argparse, nor rich, nor a way out of the process."""
    from yopo.runs import api, diagnosing, evaluating, keeper, learner, saved, trainer

    for module in (api, diagnosing, evaluating, keeper, learner, saved, trainer):
        assert module.__file__ is not None
        text = Path(module.__file__).read_text()
        assert not any(word in text for word in ("argparse", "rich", "sys.exit", "print("))
    assert "yopo.runs.api" in sys.modules
