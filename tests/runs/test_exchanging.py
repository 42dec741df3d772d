"""`--parallel flat`, `ddp` and `fsdp` in two processes (gloo) against one on the combined batch."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yopo
import yopo.runs.trainer
from tests.runs.test_distributed import METHODS
from tests.tiny import (
    PATIENCE,
    Silent,
    as_one_of,
    forkserver,
    free_port,
    tiny_config,
    tiny_data,
    tiny_trainer,
    wait_until,
)
from yopo.cli.training import lost_others_are_named
from yopo.core import seals, tensor_files
from yopo.core.digest import weights_digest
from yopo.core.parallel import is_shard
from yopo.data.source import Feed, Source
from yopo.models import resnet50, wideresnet
from yopo.runs import exchanging
from yopo.runs.fitting import shared_out
from yopo.runs.images import _opens
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested
from yopo.runs.snapshot import CARRIED

WAYS = ("flat", "ddp", "fsdp")
NET: Tree = {"options": {"width": 4, "size": 16, "hidden": 8, "dropout": 0.0}}
PLAIN: Tree = {"model": NET, "optimizer": {"clip": 0.2}, "schedule": {"warmup": 0}}
STEPS = 4
# A run without random numbers in its steps, and with all kinds of state.
WHOLE: Tree = {
    "model": NET,
    "method": METHODS["free"],
    "optimizer": {"name": "adamw", "lr": 0.003},
    "diagnose": {"every": 2, "images": 4},
}
STAGES = [("ddp", (0, 3)), ("fsdp", (1, 3)), ("alone", (2, 1)), ("ddp", None)]  # stopped at
# The same for one process, two or three, with a collapse in its second epoch.
SHARED: Tree = WHOLE | {"batch": 12, "diagnose": {"every": 1, "images": 4}}
SEVERAL = ("ddp", "fsdp")
KILLED = (2, 4)  # in the last epoch


def settings(method: str, way: str) -> Tree:
    accumulate = {} if method == "free" else {"accumulate": 2}
    optimizer = PLAIN["optimizer"] | accumulate
    return PLAIN | {"method": METHODS[method], "parallel": way, "optimizer": optimizer}


def steps(over: Tree, out: Path) -> dict[str, Tensor]:
    """The averaged weights after a few steps, whose starts belong to the image."""
    trainer = tiny_trainer(out, over)
    learner = trainer.learner
    if learner.world > 1:
        assert any(is_shard(p) for p in learner.follower.parameters()) == (
            learner.parallel == "fsdp"
        )
    real = learner.method.backward

    def backward(x: Tensor, y: Tensor) -> yopo.Step:
        start = 0.1 * torch.sin(1000 * x) if over["method"]["name"] != "free" else None
        return real(x, y, start)

    learner.method.backward = backward  # type: ignore[method-assign, assignment]
    for step, (x, y) in enumerate(trainer.loader.epoch(0)):
        trainer._step(x.double(), y, step)
        if step + 1 == STEPS:
            break
    learner.check_same_weights()
    return learner.weights()


def stage(
    folder: Path, way: str, stop_at: tuple[int, int] | None, over: Tree = WHOLE
) -> yopo.runs.trainer.Trainer:
    """Go on with a run until it is stopped in the middle of an epoch, or to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)
        return _stage(folder, way, stop_at, over)


def _stage(
    folder: Path, way: str, stop_at: tuple[int, int] | None, over: Tree
) -> yopo.runs.trainer.Trainer:
    trainer = made(folder, way, over)
    trainer.resume()
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        trainer.stop = (trainer.progress.epoch, number) == stop_at
        return real(x, y, number)

    trainer._step = step  # type: ignore[method-assign]
    if stop_at is None:
        trainer.run()
    else:
        with pytest.raises(StopRequested):
            trainer.run()
    return trainer


def made(folder: Path, way: str, over: Tree) -> yopo.runs.trainer.Trainer:
    """In float64; a loss is lost, once, in a run that collapses."""
    trainer = tiny_trainer(folder, over | {"parallel": way if way != "alone" else "flat"})
    real, batches = trainer._step, trainer.loader.epoch

    def epoch(epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x.double(), y) for x, y in batches(epoch, start))

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        out, p = real(x, y, number), trainer.progress
        if over is SHARED and (p.epoch, p.rollbacks, number) == (1, 0, 3):
            out.loss.fill_(torch.nan)
        return out

    trainer.loader.epoch = epoch  # type: ignore[method-assign]
    trainer._step = step  # type: ignore[method-assign]
    return trainer


def killed(folder: Path, way: str) -> None:
    """The last one is, in the middle of a step; what the others say."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    trainer = made(folder / f"killed {way}", way, SHARED)
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        if rank == last and (trainer.progress.epoch, number) == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(x, y, number)

    trainer._step = step  # type: ignore[method-assign]
    yopo.runs.trainer.CHECK_EVERY = 1  # this process does nothing more
    with pytest.raises(RuntimeError, match="cannot reach another one") as error:  # noqa: SIM117
        with lost_others_are_named():
            trainer.run()
    assert (trainer.progress.epoch, trainer.progress.rollbacks) == (KILLED[0], 1)
    (folder / f"{way} {rank} said").write_text(str(error.value))


def trio(rank: int, port: int, out: str) -> None:
    """Go on with what two wrote."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    as_one_of(3, rank, port)
    folder = Path(out)
    for way in SEVERAL:
        trainer = stage(folder / f"three {way}", way, None, SHARED)
        assert trainer.progress.rollbacks == 1
    killed(folder, "fsdp")
    os._exit(0)  # a group that lost one cannot be left in order


def pair(rank: int, port: int, out: str) -> None:
    """All that needs two processes, in one start of them."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    as_one_of(2, rank, port)
    folder = Path(out)
    for method in METHODS:
        for way in WAYS:
            found = steps(settings(method, way), folder / "none")
            tensor_files.save_weights(folder / f"{method} {way} {rank}", found, {})
    with pytest.raises(ValueError, match=r"PMP runs the network .*say flat"):
        tiny_trainer(folder / "none", {"method": {"name": "pmp"}, "parallel": "ddp"})

    uneven = stage(folder / "uneven", "flat", (0, 2), WHOLE | {"batch": 21})
    assert (uneven.learner.batch, uneven.progress.step) == (20, 3)

    for number, (way, stop_at) in enumerate(STAGES):
        if way == "alone":
            dist.barrier()
            (folder / f"{rank} wait").touch()
            wait_until((folder / "go on").exists)
            continue
        trainer = stage(folder / "run", way, stop_at)
        spread = [p for p in trainer.learner.model.parameters() if is_shard(p)]
        assert bool(spread) == (way == "fsdp"), number
        if way == "fsdp":  # in its checkpoint each process wrote its part
            assert len([*(folder / "run").rglob("shard-*")]) >= 2

    for way in SEVERAL:
        stage(folder / f"three {way}", way, (0, 3), SHARED)
    killed(folder, "ddp")
    os._exit(0)  # a group that lost one cannot be left in order


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, before = tmp_path_factory.mktemp("exchanging"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    context, port = forkserver(), free_port()
    two = [context.Process(target=pair, args=(rank, port, str(folder))) for rank in (0, 1)]
    for process in two:
        process.start()

    def waits() -> bool:
        assert all(process.exitcode in (None, 0) for process in two)
        return all((folder / f"{rank} wait").exists() for rank in (0, 1))

    try:
        wait_until(waits)
        stage(folder / "run", "alone", STAGES[2][1])
        (folder / "go on").touch()
        assert ends(two) == [0, -signal.SIGKILL]
    finally:
        torch.set_default_dtype(before)
        for process in two:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def shared(found: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by one process; and what three made of that which two had begun."""
    alone, before = tmp_path_factory.mktemp("alone"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    context, port = forkserver(), free_port()
    three = [context.Process(target=trio, args=(rank, port, str(found))) for rank in range(3)]
    for process in three:
        process.start()
    try:
        stage(alone, "alone", None, SHARED)
        assert ends(three) == [0, 0, -signal.SIGKILL]
    finally:
        torch.set_default_dtype(before)
        for process in three:
            process.kill()
    return alone


def ends(processes: list[Any]) -> list[int]:
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def assert_same_run(found: Path, expected: Path) -> None:
    """Its weights, lines of metrics and results, up to rounding."""
    for name in ("model.safetensors", "model-last.safetensors"):
        here = tensor_files.load_weights(found / name)
        for key, value in tensor_files.load_weights(expected / name).items():
            torch.testing.assert_close(here[key], value, rtol=0, atol=1e-9)
    pairs = zip(*(seals.read_lines(f / "metrics.jsonl")[0] for f in (expected, found)), strict=True)
    for a, b in pairs:
        assert a.keys() == b.keys()
        for key in a.keys() - {"train_seconds", "evaluate_seconds", "processor_seconds"}:
            assert a[key] == pytest.approx(b[key], abs=1e-8), key
    results = [seals.read_json(folder / "result.json") for folder in (expected, found)]
    assert results[0]["best_epoch"] == results[1]["best_epoch"]
    assert results[0]["last"] == pytest.approx(results[1]["last"])
    assert results[0]["best"] == pytest.approx(results[1]["best"])


@pytest.mark.parametrize("way", SEVERAL)
def test_three_end_what_two_began_as_one_would(way: str, found: Path, shared: Path) -> None:
    """With a look at co-states after each epoch, and a collapse that they come back from."""
    run = found / f"three {way}"
    assert_same_run(run, shared)
    lines = seals.read_lines(run / "metrics.jsonl")[0]
    assert [line.get("collapse") for line in lines] == [None, "the loss is not finite", None, None]
    assert all(line["diagnose"] for line in lines if "collapse" not in line)
    named = seals.read_json(run / "result.json")["weights_sha256"]
    for which, name in (("best", "model.safetensors"), ("last", "model-last.safetensors")):
        net = tiny_trainer(run, SHARED).learner.follower.double()
        net.load_state_dict(tensor_files.load_weights(run / name))
        assert weights_digest(net) == named[which]


@pytest.mark.parametrize("way", SEVERAL)
def test_one_that_is_killed_ends_the_others_and_the_run_goes_on(
    way: str, found: Path, shared: Path
) -> None:
    """Of three in the one way, of two in the other; one process goes on."""
    said = [*found.glob(f"{way} * said")]
    assert len(said) == (2 if way == "fsdp" else 1)
    assert all(file.read_text() for file in said)
    run, before = found / f"killed {way}", torch.get_default_dtype()
    assert not (run / "result.json").exists()
    torch.set_default_dtype(torch.float64)
    try:
        stage(run, "alone", None, SHARED)
    finally:
        torch.set_default_dtype(before)
    assert_same_run(run, shared)


@pytest.mark.parametrize("method", METHODS)
def test_each_way_is_one_process_on_the_combined_batch(
    method: str, found: Path, tmp_path: Path
) -> None:
    """Averaged, clipped, and accumulated but in Free."""
    one = steps(settings(method, "fsdp"), tmp_path)  # alone it changes nothing
    for way in WAYS:
        first, second = (tensor_files.load_weights(found / f"{method} {way} {r}") for r in (0, 1))
        for name, value in one.items():
            assert torch.equal(first[name], second[name])
            torch.testing.assert_close(first[name], value, rtol=0, atol=1e-10)


def test_a_run_goes_on_from_ddp_to_fsdp_to_one_process_and_back(
    found: Path, tmp_path: Path
) -> None:
    stage(tmp_path, "alone", None)
    run = found / "run"
    assert_same_run(run, tmp_path)
    shards = sorted(path.name for path in (run / "state").rglob("shard-*"))
    assert not shards  # the last two stages wrote whole ones, and of the others none is left


def test_an_epoch_goes_on_in_batches_of_another_size(found: Path, tmp_path: Path) -> None:
    """Two processes took 20 images for 21, three steps of them."""
    watcher = Silent()
    trainer = tiny_trainer(found / "uneven", WHOLE | {"batch": 21}, watcher)
    assert trainer.resume()
    p = trainer.progress
    assert (p.epoch, p.step, trainer.learner.batch) == (0, 2, 21)
    assert "3 steps with batches of 20 images are counted as 2 with 21" in watcher.said
    assert 0.5 < p.loss_sum / p.step < 3  # the mean of steps that begin at log 4
    assert 0 <= p.right <= 42
    assert trainer.learner.method.state_dict()["eta"].shape[0] == 20
    stage(found / "uneven", "alone", None, WHOLE | {"batch": 21})


@pytest.mark.parametrize(("every", "step"), [(1, 1), (4, 4), (8, 5)])
def test_an_epoch_does_not_go_on_inside_a_step(every: int, step: int, tmp_path: Path) -> None:
    """Which would be the mean of fewer batches than it is divided by; one has 5 batches of 20."""
    trainer = tiny_trainer(tmp_path, {"optimizer": {"accumulate": every}})
    p = trainer.progress
    p.step = 4
    trainer.keeper._in_steps_of(5, p)
    assert p.step == step


def test_what_cannot_be_shared_out_begins_anew(found: Path, tmp_path: Path) -> None:
    """Free's perturbation of 20 images, among three processes."""
    snapshot = tiny_trainer(tmp_path, WHOLE).learner.snapshot
    tensors = snapshot.take() | {f"{CARRIED}eta": torch.arange(20.0).view(20, 1)}
    own = snapshot.own(tensors, 1, 2)
    assert own[f"{CARRIED}eta"].flatten().tolist() == [*range(10, 20)]
    assert snapshot.own(tensors, 1, 3).keys() == snapshot.take().keys()


@pytest.mark.parametrize(
    ("batch", "world", "shared"),
    [(20, 2, 20), (21, 2, 20), (20, 3, 21), (20, 8, 16), (2, 3, 3), (100, 8, 96), (100, 7, 98)],
)
def test_the_nearest_batch_that_can_be_shared(batch: int, world: int, shared: int) -> None:
    """Of 100 images to train on."""
    assert shared_out(tiny_config({"batch": batch}), tiny_data(), world) == shared


def test_blocks_are_spread_one_by_one() -> None:
    wide = wideresnet(10, depth=10, width=1)
    found = exchanging.blocks(wide)
    assert len(found) == 3
    assert len({type(block) for block in found}) == 1
    assert not exchanging.blocks(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4)))
    assert len(exchanging.blocks(resnet50(10, width=8, blocks=(2, 2, 1, 1)))) == 6
    nested = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)))
    assert exchanging.blocks(nested) == [*nested]


class Batches:
    """Made before anyone said for which process."""

    def __len__(self) -> int:
        return 1

    def epoch(self, epoch: int, start: int = 0) -> Any:
        raise NotImplementedError


def test_batches_that_nobody_shares_out_are_refused() -> None:
    source: Source = Batches()
    opened: Callable[[Feed], Source] = _opens(source)
    cpu = torch.device("cpu")
    assert opened(Feed(4, 0, cpu)) is source
    with pytest.raises(ValueError, match="2 processes would train on the same batches"):
        opened(Feed(4, 0, cpu, rank=1, world=2))
    assert _opens(lambda _: source)(Feed(4, 0, cpu, rank=1, world=2)) is source
