"""The loop: exact resume, guard, clock, what is kept."""

import json
import random
import resource
import types
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import yopo
import yopo.runs.epoch_end
import yopo.runs.keeper
import yopo.runs.learner
import yopo.runs.trainer
from tests.conftest import assert_same
from tests.tiny import (
    Silent,
    dawdle,
    forkserver,
    run_until_killed,
    tiny_config,
    tiny_data,
    tiny_trainer,
    weights,
)
from yopo.core import seals, tensor_files
from yopo.core.digest import weights_digest
from yopo.data.source import Pictures
from yopo.data.sources import Arrays
from yopo.runs import measure, state
from yopo.runs.folder import RunFolder
from yopo.runs.guard import Health, collapse, learnt
from yopo.runs.measure import commonest
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested

pytestmark = pytest.mark.usefixtures("float32")


def lines(out: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what the clock says."""
    found, torn = seals.read_lines(out / "metrics.jsonl")
    assert torn is None
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in found]


def files(out: Path) -> dict[str, dict[str, Tensor]]:
    return {
        name: tensor_files.load_weights(out / name)
        for name in ("model.safetensors", "model-last.safetensors")
    }


def assert_equal_runs(a: Path, b: Path) -> None:
    for name, tensors in files(a).items():
        for key, value in tensors.items():
            assert torch.equal(value, files(b)[name][key]), f"{name}: {key}"
    assert lines(a) == lines(b)
    one, other = (json.loads((out / "result.json").read_text()) for out in (a, b))
    assert one["best"] == other["best"]
    assert one["last"] == other["last"]


METHODS: list[Tree] = [
    {},
    {"optimizer": {"name": "adamw", "lr": 0.01}},
    {"method": {"name": "free", "m": 2}},
    {"method": {"name": "trades-yopo", "m": 2, "n": 2}, "optimizer": {"accumulate": 2}, "ema": 0},
    {
        "method": {"name": "nfgsm"},
        "data": {"crop": 2, "flip": True, "cutout": 4},
        "precision": "bf16",
        "model": {"name": "preactresnet18", "options": {"width": 4, "blocks": [1, 1]}},
    },
]


@pytest.mark.parametrize(
    "over", METHODS, ids=["yopo+ema", "adamw", "free", "accumulate", "augment+bn+bf16"]
)
def test_stopping_at_any_step_and_going_on_changes_nothing(
    over: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)
    tiny_trainer(tmp_path / "whole", over).run()
    stops = 0
    while True:
        trainer = tiny_trainer(tmp_path / "pieces", over)
        trainer.resume()
        watched = trainer.files.watch
        left = 2

        def step(*_: object, trainer: yopo.runs.trainer.Trainer = trainer) -> None:
            nonlocal left
            left -= 1
            trainer.stop = left <= 0

        monkeypatch.setattr(watched, "step", step)
        try:
            trainer.run()
            break
        except StopRequested:
            stops += 1
    assert stops >= 4
    assert_equal_runs(tmp_path / "whole", tmp_path / "pieces")


def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    """SIGKILL at random moments, half of them while a checkpoint is being written.

    Each life is given a few steps, so that no machine is fast enough to end before.
    """
    over: Tree = {"epochs": 12}
    context = forkserver()
    whole = context.Process(target=run_until_killed, args=(str(tmp_path / "whole"), over))
    whole.start()
    rng, half_written = random.Random(0), 0
    out = tmp_path / "killed"
    for kill in range(22):
        (out / "held").unlink(missing_ok=True)
        part = (0, rng.randint(1, 10)) if kill % 2 else (3, 0)  # five flushes a checkpoint
        process = context.Process(target=run_until_killed, args=(str(out), over, *part))
        process.start()
        while not (out / ("held" if kill % 2 else "state")).exists():
            assert process.is_alive()
            dawdle(0.01, 0.02, rng)
        dawdle(0, 0 if kill % 2 else 0.2, rng)
        process.kill()
        process.join()
        half_written += (out / "state" / ".writing").exists()
    last = context.Process(target=run_until_killed, args=(str(out), over))
    last.start()
    for process in (whole, last):
        process.join()
        assert process.exitcode == 0
    assert half_written >= 3
    assert_equal_runs(tmp_path / "whole", out)


def test_a_damaged_newest_checkpoint_costs_only_time(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "whole").run()
    out = tmp_path / "damaged"
    trainer = tiny_trainer(out)
    trainer.keeper.save()
    for _ in range(2):
        trainer.epoch_end.finish(trainer._epoch())
    newest = state.saved(out / "state")[0] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    watcher = Silent()
    trainer = tiny_trainer(out, watcher=watcher)
    assert trainer.resume()
    assert "is damaged" in watcher.said[0]
    assert trainer.progress.epoch == 1
    trainer.run()
    assert_equal_runs(tmp_path / "whole", out)


def test_a_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    tiny_trainer(tmp_path).run()
    with pytest.raises(ValueError, match="another configuration"):
        tiny_trainer(tmp_path, {"optimizer": {"lr": 0.01}}).resume()
    assert tiny_trainer(tmp_path, {"checkpoint": {"keep": 5}}).resume()


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = state.save, 0

    def save(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(state, "save", save)
    watcher = Silent()
    tiny_trainer(tmp_path, watcher=watcher).run()
    assert any("No space left" in said and "earlier ones are kept" in said for said in watcher.said)
    assert (tmp_path / "result.json").exists()


def test_held_out_images_are_apart_and_the_test_set_is_touched_at_the_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(tmp_path)
    data = tiny_data()
    held = {image.numpy().tobytes() for image in trainer.images.held.read(torch.arange(20))}
    trained = [
        image.numpy().tobytes()
        for x, _ in trainer.loader.epoch(0)
        for image in (x * 255).round().byte()
    ]
    assert len(held) == 20
    assert not held & set(trained)
    seen: list[int] = []
    real = measure.accuracies
    test = data.x_test.numpy().tobytes()

    def accuracies(model: nn.Module, pictures: Pictures, *rest: Any) -> tuple[float, float]:
        x = pictures.read(torch.arange(len(pictures)))
        seen.append(trainer.progress.epoch if x.numpy().tobytes() == test else -1)
        return real(model, pictures, *rest)

    for module in (yopo.runs.trainer, yopo.runs.epoch_end):
        monkeypatch.setattr(module, "accuracies", accuracies)
    trainer.run()
    assert seen == [-1, -1, -1, 3, 3]


@pytest.mark.parametrize(("natural", "keep"), [(False, "best"), (True, "best"), (False, "last")])
def test_the_best_weights_are_those_of_the_best_epoch(
    natural: bool, keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By robust accuracy; after natural training, which has none, by clean accuracy."""
    tree: Tree = {"guard": {"action": "ignore"}, "evaluate": {"keep": keep}}
    trainer = tiny_trainer(tmp_path, tree | ({"method": {"name": "natural"}} if natural else {}))
    scores = iter([(0.3, 0.9), (0.6, 0.8), (0.5, 0.7)])
    kept: list[dict[str, Tensor]] = []

    def evaluate(images: int) -> tuple[float, float]:
        kept.append(weights(trainer.learner.follower))
        good, bad = next(scores)
        return (good, bad) if natural else (bad, good)

    monkeypatch.setattr(trainer.epoch_end, "evaluate", evaluate)
    result = trainer.run()
    assert result["best_epoch"] == (2 if keep == "best" else 3)
    best = tensor_files.load_weights(tmp_path / "model.safetensors")
    chosen = kept[1 if keep == "best" else 2]
    assert all(torch.equal(v, chosen[k]) for k, v in best.items())
    last = tensor_files.load_weights(tmp_path / "model-last.safetensors")
    assert all(torch.equal(v, kept[2][k]) for k, v in last.items())


def test_the_loop_is_plain_sgd_for_natural_training(tmp_path: Path) -> None:
    """Against torch.optim.SGD written out, with clipping and accumulation."""
    over: Tree = {
        "method": {"name": "natural"},
        "optimizer": {"lr": 0.1, "clip": 0.5, "accumulate": 2, "nesterov": True},
        "schedule": {"name": "constant", "warmup": 0},
        "model": {"options": {"width": 4, "size": 16, "hidden": 8, "dropout": 0.0}},
        "epochs": 2,
        "ema": 0,
        "label_smoothing": 0.1,
    }
    trainer = tiny_trainer(tmp_path, over)
    torch.manual_seed(0)
    twin = yopo.models.SmallCNN(4, width=4, size=16, hidden=8, dropout=0.0)
    twin.load_state_dict(trainer.learner.model.state_dict())
    sgd = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for epoch in range(2):
        batches = list(trainer.loader.epoch(epoch))
        for group in (batches[i : i + 2] for i in range(0, len(batches), 2)):
            for x, y in group:
                loss = F.cross_entropy(twin(x), y, label_smoothing=0.1) / len(group)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            sgd.step()
            sgd.zero_grad()
    trainer.run()
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(
            trainer.learner.model.state_dict()[key], value, rtol=1e-5, atol=1e-6
        )


@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor"
)  # of torch's own making, when it compiles
def test_the_engine_trains_the_same_network(tmp_path: Path) -> None:
    """Through compiled steps, with a growing eps, a schedule, averaging and a stop on the way."""
    over: Tree = {
        "method": {"name": "fast"},
        "threat": {"name": "l2", "eps": 1.0},  # in L∞ a gradient near 0 may round to either sign
        "eps_warmup": 2,
        "model": {"options": {"dropout": 0.0}},
    }
    plain = tiny_trainer(tmp_path / "plain", over)
    plain.run()
    compiled = tiny_trainer(tmp_path / "compiled", over | {"engine": "compiled"})
    compiled.stop = True
    with pytest.raises(StopRequested):
        compiled.run()
    compiled = tiny_trainer(tmp_path / "compiled", over | {"engine": "compiled"})
    assert compiled.resume()
    result = compiled.run()
    assert result["warmup_seconds"] > 0
    for a, b in (
        (plain.learner.model, compiled.learner.model),
        (plain.learner.follower, compiled.learner.follower),
    ):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=1e-4, atol=1e-6)


def test_ema_follows_and_keeps_its_own_statistics(tmp_path: Path) -> None:
    over: Tree = {"model": {"name": "preactresnet18", "options": {"width": 4, "blocks": [1]}}}
    over["method"] = {"name": "pgd", "steps": 1}
    trainer = tiny_trainer(tmp_path, over)
    assert trainer.learner.ema is not None
    average = {k: v.double() for k, v in trainer.learner.model.state_dict().items()}
    for step, (x, y) in enumerate(trainer.loader.epoch(0)):
        trainer._step(x, y, step)
        decay = min(0.9, (1 + step) / (10 + step))
        for k, v in trainer.learner.model.state_dict().items():
            average[k] = decay * average[k] + (1 - decay) * v.double()
    for k, v in trainer.learner.ema.model.state_dict().items():
        if v.is_floating_point():
            torch.testing.assert_close(v.double(), average[k], rtol=1e-4, atol=1e-6)
    assert not torch.equal(
        trainer.learner.ema.model.state_dict()["bn.running_mean"],
        trainer.learner.model.state_dict()["bn.running_mean"],
    )


def test_the_clock_counts_training_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: a step takes 1 second, warming up 10, an evaluation 100, …"""
    now = 0.0

    def taking(seconds: float, work: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return work(*args, **kwargs)

        return slow

    names = ("perf_counter", "monotonic", "process_time")
    clock = types.SimpleNamespace(**dict.fromkeys(names, lambda: now))
    for module in (yopo.runs.trainer, yopo.runs.learner, yopo.runs.epoch_end, yopo.runs.keeper):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)
    trainer = tiny_trainer(tmp_path)
    monkeypatch.setattr(trainer, "_step", taking(1, trainer._step))
    real = (
        trainer.learner.method.prepare
    )  # called in every step; the first call studies the network
    slow = iter([taking(10, real)])
    monkeypatch.setattr(trainer.learner.method, "prepare", lambda *batch: next(slow, real)(*batch))
    monkeypatch.setattr(trainer.epoch_end, "evaluate", taking(100, trainer.epoch_end.evaluate))
    monkeypatch.setattr(state, "save", taking(10000, state.save))
    result = trainer.run()
    assert result["train_seconds"] == 3 * 5
    assert trainer.progress.processor_seconds == 3 * 5
    assert result["warmup_seconds"] == 10
    assert result["evaluate_seconds"] == 3 * 100
    assert result["propagations"] == pytest.approx(3 * (2 + 2 / 3))


# ---------------------------------------------------------------- the guard


def test_collapse_is_told_from_ordinary_epochs() -> None:
    assert collapse(Health(loss=1.0, train=0.5, robust=0.4, best=0.45)) is None
    assert collapse(Health(loss=1.0, train=0.2, robust=0.1, best=-1)) is None
    assert "loss" in str(collapse(Health(loss=float("nan"), train=0, robust=0, best=0.5)))
    assert "catastrophic" in str(collapse(Health(loss=0.1, train=0.9, robust=0.02, best=0.4)))
    assert collapse(Health(loss=2.3, train=0.1, robust=0.1, best=0.4)) is None  # merely bad
    dead = Health(loss=2.3, train=0.1, robust=0.085, best=-1, clean=0.085, cleanest=0.968)
    assert "unlearnt: clean accuracy fell from 96.8% to 8.5%" in str(collapse(dead))
    assert collapse(replace(dead, cleanest=0.3)) is None  # had hardly begun
    assert collapse(replace(dead, clean=0.3)) is None
    # TRADES-10 with seed 2, epoch 1 (records/trades-10-diverged-h200); seed 0 beside it.
    blown = Health(loss=36.6, train=0.241, robust=0.085, best=-1, clean=0.085)
    assert "diverged: the loss is 36.6" in str(collapse(blown))
    assert collapse(replace(blown, clean=0.28)) is None  # has learnt in spite of it
    assert collapse(replace(blown, loss=2.36)) is None  # a plateau
    assert collapse(replace(blown, classes=10**5)) is None
    # Of two classes, one answer is right for more than half of the images, whatever the attack.
    assert collapse(Health(loss=0.5, train=0.9, robust=0.06, best=0.57, chance=0.57)) is None


def test_a_huge_rate_is_rolled_back_until_it_trains(tmp_path: Path) -> None:
    watcher = Silent()
    over: Tree = {
        "optimizer": {"lr": 1e9},  # seven layers of weights of 1e7 cannot but overflow
        "schedule": {"name": "constant", "warmup": 0},
        "guard": {"shrink": 1e-11},
        "ema": 0,
    }
    trainer = tiny_trainer(tmp_path, over, watcher)
    trainer.run()
    assert any("the loss is not finite" in said for said in watcher.said)
    assert trainer.progress.rollbacks >= 1
    assert all(v.isfinite().all() for v in trainer.learner.model.state_dict().values())
    collapsed = [line for line in lines(tmp_path) if "collapse" in line]
    assert len(collapsed) == trainer.progress.rollbacks


def test_a_run_that_diverges_in_its_first_epoch_starts_again(tmp_path: Path) -> None:
    """Its numbers are finite, so nothing else shows it. What follows is the run at that rate.

    One sure answer for all images, which no gradient changes: it is put there before every step.
    """
    watcher = Silent()
    over: Tree = {"schedule": {"name": "constant", "warmup": 0}, "guard": {"shrink": 2**-11}}
    trainer = tiny_trainer(tmp_path / "wild", over | {"optimizer": {"lr": 2**7}}, watcher)
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        if trainer.progress.rollbacks == 0:
            for model in (trainer.learner.model, trainer.learner.follower):
                last = model.get_submodule("fc3")
                last.weight.data.zero_()  # type: ignore[operator]
                last.bias.data = torch.tensor([1e3, 0, 0, 0])
        return real(x, y, number)

    trainer._step = step  # type: ignore[method-assign]
    trainer.run()
    assert [line["epoch"] for line in watcher.lines] == [1, 1, 2, 3]
    assert "training diverged" in watcher.lines[0]["collapse"]
    assert any("Back to the start, learning rate times" in said for said in watcher.said)
    calm = tiny_trainer(tmp_path / "calm", over | {"optimizer": {"lr": 2**-4}})
    calm.run()
    assert_same(trainer.learner.model.state_dict(), calm.learner.model.state_dict(), tol=0)


def test_weights_broken_by_the_last_step_of_an_epoch_are_never_kept(tmp_path: Path) -> None:
    """The loss is still finite then; only the weights show it."""
    trainer = tiny_trainer(tmp_path, {"ema": 0})
    broken = False
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        nonlocal broken
        out = real(x, y, number)
        if not broken and trainer.progress.epoch == 1 and number == 4:
            broken = True
            next(trainer.learner.model.parameters()).data.fill_(float("nan"))
        return out

    trainer._step = step  # type: ignore[method-assign]
    trainer.run()
    assert trainer.progress.rollbacks == 1
    assert "not finite" in str(lines(tmp_path)[1]["collapse"])
    for tensors in files(tmp_path).values():
        assert all(v.isfinite().all() for v in tensors.values())


def test_going_back_keeps_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of the epoch that it goes back to, although no checkpoint was written then."""
    over: Tree = {"epochs": 4, "checkpoint": {"pause": 100}, "evaluate": {"every": 1}}
    trainer = tiny_trainer(tmp_path, over)
    robust = iter([0.5, 0.7, 0.02, 0.6, 0.6])
    monkeypatch.setattr(trainer.epoch_end, "evaluate", lambda *_: (0.9, next(robust)))
    monkeypatch.setattr(
        yopo.runs.epoch_end, "Health", lambda **seen: Health(**seen | {"train": 0.95})
    )
    kept: list[bytes] = []
    real = trainer.keeper.recover

    def recover(reason: str) -> None:
        kept.append((tmp_path / "model.safetensors").read_bytes())
        real(reason)

    monkeypatch.setattr(trainer.keeper, "recover", recover)
    result = trainer.run()
    assert trainer.progress.rollbacks == 1
    assert result["best_epoch"] == 2
    assert (tmp_path / "model.safetensors").read_bytes() == kept[0]


def test_one_answer_for_all_images_is_the_least(tmp_path: Path) -> None:
    assert commonest(torch.tensor([2, 0, 2, 1])) == 0.5
    trainer = tiny_trainer(tmp_path)
    assert trainer.images.chance == commonest(trainer.images.held.labels)


def test_a_first_batch_that_does_not_fit_leaves_the_folder_free(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.learner.model.fc3 = nn.Linear(8, 2)  # fewer outputs than labels
    with pytest.raises(ValueError, match="expected labels from 0 to 1 for a model with 2 outputs"):
        trainer.run()
    assert not list(tmp_path.iterdir())


def test_a_collapse_between_full_evaluations_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(tmp_path, {"evaluate": {"every": 3}, "guard": {"action": "stop"}})
    robust = iter([0.5, 0.02, 0.02])
    monkeypatch.setattr(trainer.epoch_end, "evaluate", lambda *_: (0.9, next(robust)))
    monkeypatch.setattr(
        yopo.runs.epoch_end, "Health", lambda **seen: Health(**seen | {"train": 0.95})
    )
    with pytest.raises(RuntimeError, match="epoch 2: catastrophic"):
        trainer.run()


def test_a_network_that_dies_while_eps_grows_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PGD-40 on MNIST did with seed 1 (docs/reproduction.md)."""
    trainer = tiny_trainer(tmp_path, {"epochs": 4, "eps_warmup": 3})
    monkeypatch.setattr(trainer.images, "chance", 0.1)
    clean = iter([0.87, 0.968, 0.085, 0.95, 0.96])
    monkeypatch.setattr(trainer.epoch_end, "evaluate", lambda *_: (next(clean), 0.05))
    trainer.run()
    assert trainer.progress.rollbacks == 1
    assert trainer.progress.rate_scale == 0.5
    assert [("collapse" in line) for line in lines(tmp_path)] == [False, False, True, False, False]


def test_weights_are_compared_once_for_each_checkpoint_and_epoch(tmp_path: Path) -> None:
    """Between processes: not again for a checkpoint that follows an epoch's end."""
    trainer = tiny_trainer(tmp_path, {"checkpoint": {"minutes": 1e6}})
    real, calls = trainer.learner.check_same_weights, 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        real()

    trainer.learner.check_same_weights = counted  # type: ignore[method-assign]
    trainer.run()
    assert trainer.progress.saves == 4
    assert calls == 4  # as the run begins, and three epochs that each end in a checkpoint


def test_a_setting_that_came_later_has_its_default(tmp_path: Path) -> None:
    """A run of a version that did not have it goes on; one of another value does not."""
    tiny_trainer(tmp_path, {"epochs": 1}).run()
    saved = state.load(state.saved(tmp_path / "state")[0])
    values = saved.values
    assert values["config"]["evaluate"].pop("keep") == "best"
    assert values["config"]["optimizer"].pop("nesterov") is False
    state.save(tmp_path / "state", 99, saved, keep=1)
    assert tiny_trainer(tmp_path, {"epochs": 1}).resume()
    other: Tree = {"epochs": 1, "evaluate": {"keep": "last"}}
    with pytest.raises(ValueError, match=r"another configuration \(evaluate\.keep\)"):
        tiny_trainer(tmp_path, other).resume()


def test_other_data_is_not_resumed_on(tmp_path: Path) -> None:
    tiny_trainer(tmp_path).run()
    with pytest.raises(ValueError, match="another configuration"):
        tiny_trainer(tmp_path, train=140).resume()


def test_a_folder_with_no_sound_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_trainer(tmp_path).run()
    for path in state.saved(tmp_path / "state"):
        (path / "values.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is sound"):
        tiny_trainer(tmp_path).resume()


def test_short_epochs_write_no_checkpoint_but_the_last_one_does(tmp_path: Path) -> None:
    over: Tree = {"checkpoint": {"minutes": 10, "pause": 100}}
    trainer = tiny_trainer(tmp_path / "a", over)
    trainer.run()
    assert trainer.progress.saves == 2  # before the first epoch and after the last
    again = tiny_trainer(tmp_path / "a", over)
    assert again.resume()
    assert again.progress.epoch == 3
    often = tiny_trainer(tmp_path / "b")
    often.run()
    assert often.progress.saves >= 4
    assert_same(
        dict(often.learner.model.state_dict()), dict(again.learner.model.state_dict()), tol=0
    )


@pytest.mark.parametrize("pause", [0, 100])
def test_a_stop_during_the_evaluation_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: int
) -> None:
    trainer = tiny_trainer(tmp_path, {"checkpoint": {"pause": pause}})

    def evaluate(*_: object) -> tuple[float, float]:
        trainer.stop = True
        return 0.5, 0.5

    monkeypatch.setattr(trainer.epoch_end, "evaluate", evaluate)
    with pytest.raises(StopRequested):
        trainer.run()
    again = tiny_trainer(tmp_path)
    assert again.resume()
    assert again.progress.epoch == 1


def test_a_stop_says_whether_it_could_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.stop = True
    monkeypatch.setattr(trainer.files, "save_state", lambda *_: False)  # a full disk
    with pytest.raises(StopRequested) as stopped:
        trainer.run()
    assert not stopped.value.saved


def test_results_name_all_hardware_and_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one GPU", "another"):
        monkeypatch.setattr(yopo.runs.trainer, "hardware", lambda _, name=name: name)
        trainer = tiny_trainer(tmp_path)
        trainer.resume()
        trainer.stop = name == "one GPU"
        with suppress(StopRequested):
            result = trainer.run()
    assert result["environment"]["hardware"] == "one GPU, then another"
    evaluated = trainer.learner.follower
    for which, file in (("best", "model.safetensors"), ("last", "model-last.safetensors")):
        evaluated.load_state_dict(tensor_files.load_weights(tmp_path / file))
        assert result["weights_sha256"][which] == weights_digest(evaluated)


def test_metrics_that_could_not_be_written_come_with_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(tmp_path)
    real, calls = Path.open, 0

    def refuse_once(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if self.name == "metrics.jsonl" and mode == "a":
            calls += 1
            if calls == 1:
                raise OSError(28, "No space left on device")
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse_once)
    trainer.run()
    assert [line["epoch"] for line in lines(tmp_path)] == [1, 2, 3]


def add_beyond_the_limit(folder: str) -> None:
    """In this process files of more than 100 bytes are cut off there, as by a full disk."""
    files = RunFolder(Path(folder), Silent(), writes=True)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
    for epoch in range(1, 11):
        files.add({"epoch": epoch, "loss": 0.25})
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    files.add({"epoch": 11, "loss": 0.25})


def test_no_half_line_is_left_by_a_disk_that_was_full(tmp_path: Path) -> None:
    process = forkserver().Process(target=add_beyond_the_limit, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [line["epoch"] for line in lines(tmp_path)] == [*range(1, 12)]


@pytest.mark.parametrize("action", ["stop", "ignore"])
def test_other_actions(action: str, tmp_path: Path) -> None:
    over: Tree = {
        "optimizer": {"lr": 1e9},
        "schedule": {"name": "constant", "warmup": 0},
        "guard": {"action": action},
        "ema": 0,
    }
    trainer = tiny_trainer(tmp_path, over)
    if action == "stop":
        with pytest.raises(RuntimeError, match="collapsed in epoch 1: the loss is") as caught:
            trainer.run()
        assert "a lower optimizer.lr" in str(caught.value)
    else:
        trainer.run()
        assert trainer.progress.rollbacks == 0


class Overfits(nn.Module):
    """Reads the bright row; once `fooled` the faint one, by gradients that lie at the images.

    So FGSM from there is withstood, and PGD, which starts elsewhere, is not: what catastrophic
    overfitting comes to, on every machine.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(classes, classes)
        self.head.weight.data = 20 * torch.eye(classes)
        self.register_buffer("fooled", torch.zeros(()))
        self.fooled: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.fooled:
            at_images = (255 * x - (255 * x).round()).abs() < 0.1
            x = torch.where(at_images, 2 * x.detach() - x, x)
        return self.head(x[:, 0, int(self.fooled)] - 0.5)  # type: ignore[no-any-return]


def rows(count: int) -> tuple[Tensor, Tensor]:
    """Which of four pixels is the brightest, in a row of strong contrast and in one of little."""
    y = torch.arange(count) % 4
    bright = F.one_hot(y, 4)
    return torch.stack([25 + 205 * bright, 118 + 20 * bright], 1)[:, None].to(torch.uint8), y


def test_catastrophic_overfitting_is_caught_and_rolled_back(tmp_path: Path) -> None:
    """FGSM with next to no noise withstands itself and nothing else, from the third epoch on.

    Back at the last good state with a tenth of the rate, the next epoch keeps its robustness.
    """

    class StopsWhenRecovered(Silent):
        def epoch(self, line: dict[str, Any]) -> None:
            trainer.stop = bool(self.lines and "collapse" in self.lines[-1])
            super().epoch(line)

    watcher = StopsWhenRecovered()
    config = tiny_config(
        {
            "method": {"name": "nfgsm", "noise": 1e-3},
            "threat": {"eps": 0.3},
            "model": {"name": "tests.runs.test_trainer:Overfits"},
            "optimizer": {"lr": 1e-3},
            "evaluate": {"steps": 10},
            "guard": {"shrink": 0.1},
            "epochs": 6,
            "ema": 0,
        }
    )
    data = Arrays(*rows(120), *rows(40), names=("a", "b", "c", "d"))
    trainer = yopo.runs.trainer.Trainer(config, data, tmp_path, watcher, torch.device("cpu"))
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        if trainer.progress.epoch == 2 and trainer.progress.rollbacks == 0:
            trainer.learner.model.get_buffer("fooled").fill_(1)
        return real(x, y, number)

    trainer._step = step  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        trainer.run()
    collapsed, after = watcher.lines[-2:]
    assert "catastrophic overfitting" in collapsed["collapse"]
    assert collapsed["action"] == "rollback"
    assert collapsed["clean"] == collapsed["train_accuracy"] == 1
    assert after["epoch"] == collapsed["epoch"] == 3
    assert "collapse" not in after
    assert after["robust"] == 1
    assert any("learning rate times 0.1 (rollback 1 of 5)" in text for text in watcher.said)


def test_an_epoch_that_answers_alike_to_all_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It withstands all attacks on the commonest class."""
    found = iter([(0.9, 0.9), (0.99, 0.6), (0.99, 0.7), (1.0, 0.7)])
    for module in (yopo.runs.trainer, yopo.runs.epoch_end):
        monkeypatch.setattr(module, "accuracies", lambda *_: next(found))
    data = tiny_data(400)
    y = (torch.arange(400) % 10 == 0).long()
    test = (torch.arange(40) % 10 == 0).long()
    data = replace(data, y_train=y, y_test=test)
    config = tiny_config(
        {"data": {"held_out": 200}, "evaluate": {"images": 200}, "guard": {"action": "ignore"}}
    )
    watcher = Silent()
    trainer = yopo.runs.trainer.Trainer(config, data, tmp_path / "a", watcher, torch.device("cpu"))
    result = trainer.run()
    assert result["best_epoch"] == 3
    assert result["chance"] == 0.9
    assert not any("learnt" in s for s in watcher.said)
    found = iter([(0.9, 0.9)] * 5)
    again = yopo.runs.trainer.Trainer(config, data, tmp_path / "b", watcher, torch.device("cpu"))
    result = again.run()
    assert any("accuracy, 90.0%, is not clearly above the 90.0%" in s for s in watcher.said)
    assert result["best_epoch"] == 1


def test_what_is_clearly_above_one_answer_for_all() -> None:
    assert [learnt(clean, 0.9, 1000) for clean in (0.9, 0.915, 0.925)] == [False, False, True]
    assert [learnt(clean, 0.1, 100) for clean in (0.1, 0.15, 0.17)] == [False, False, True]
    assert [learnt(clean, 0.9, 30) for clean in (0.9, 29 / 30, 1.0)] == [False, False, True]
    assert learnt(1.0, 1.0, 10)  # there is but one answer


def test_a_checkpoint_of_an_earlier_version_without_a_best(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.progress.best = -1.0
    trainer.keeper.save()
    again = tiny_trainer(tmp_path)
    assert again.resume()
    assert again.run()["best_epoch"] > 0
