"""Two processes (gloo) against one on the combined batch."""

import copy
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import yopo
import yopo.runs.trainer
from tests.conftest import GPU, assert_same
from tests.tiny import (
    BASE,
    PATIENCE,
    Silent,
    as_one_of,
    forkserver,
    free_port,
    tiny_data,
    tiny_trainer,
)
from yopo.core import seals, tensor_files
from yopo.evaluation import suite
from yopo.runs import asking, distributed, measure
from yopo.runs.overlay import Tree, overlay
from yopo.runs.progress import StopRequested
from yopo.runs.settings import validate

METHODS: dict[str, Tree] = {
    "yopo": {"name": "yopo", "m": 3, "n": 2, "first_layer": "relu1"},
    "pgd": {"name": "pgd", "steps": 3},
    "trades-yopo": {"name": "trades-yopo", "m": 2, "n": 2, "first_layer": "relu1"},
    "free": {"name": "free", "m": 3},
}
PLAIN: Tree = {
    "ema": 0,
    "optimizer": {"clip": 0.2},
    "model": {"options": {"width": 4, "size": 16, "hidden": 8, "dropout": 0.0}},
}
BATCHNORM: Tree = {
    "ema": 0,
    "sync_batchnorm": True,
    "model": {"name": "preactresnet18", "options": {"width": 4, "blocks": [1, 1]}},
}
STEPS = 4


def train_steps(out: str, over: Tree, rank: int, world: int, port: int) -> None:
    """A few steps in float64 with starts that belong to the image, not to the process."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if world > 1:
        as_one_of(world, rank, port)
    trainer = tiny_trainer(Path(out), over, Silent())
    calls = 0
    all_reduce = torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> object:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = counted
    real = trainer.learner.method.backward

    def backward(x: Tensor, y: Tensor) -> object:
        start = 0.1 * torch.sin(1000 * x) if over["method"]["name"] != "free" else None
        return real(x.double(), y, start)

    trainer.learner.method.backward = backward  # type: ignore[method-assign, assignment]
    warnings.filterwarnings("error", message=".*exchange_gradients")  # it takes care itself
    updates = 0
    for epoch in range(2):
        for step, (x, y) in enumerate(trainer.loader.epoch(epoch)):
            trainer._step(x, y, step)
            updates += 1
            if updates == STEPS:
                break
        if updates == STEPS:
            break
    optimizer_steps = STEPS * (over["method"]["m"] if over["method"]["name"] == "free" else 1)
    if world > 1 and not over.get("sync_batchnorm"):
        assert calls == optimizer_steps, f"{calls} exchanges in {optimizer_steps} steps"
    tensor_files.save_weights(Path(out), dict(trainer.learner.model.state_dict()), {})


def run(
    tmp_path: Path, over: Tree, world: int, target: Any = train_steps
) -> list[dict[str, Tensor]]:
    context = forkserver()
    port, outs = free_port(), [tmp_path / f"{world}-{rank}" for rank in range(world)]
    processes = [
        context.Process(target=target, args=(str(out), over, rank, world, port))
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [tensor_files.load_weights(out) for out in outs]


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_are_one_on_the_combined_batch(method: str, tmp_path: Path) -> None:
    over = PLAIN | {"method": METHODS[method]}
    (one,) = run(tmp_path, over, 1)
    first, second = run(tmp_path, over, 2)
    for key, value in one.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["pgd", "trades-yopo", "yopo"])
def test_the_same_with_synchronised_batchnorm(method: str, tmp_path: Path) -> None:
    split = {} if method == "pgd" else {"first_layer": "layer1"}
    over = BATCHNORM | {"method": METHODS[method] | split}
    (one,) = run(tmp_path, over, 1)
    first, _ = run(tmp_path, over, 2)
    for key, value in one.items():
        if "num_batches" not in key:
            torch.testing.assert_close(first[key], value, rtol=0, atol=1e-6)


def test_synchronising_batchnorm_changes_nothing_else() -> None:
    for momentum in (0.0, 0.3, None):
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, 1e-3, momentum))
        for p in net[1].parameters():
            torch.nn.init.uniform_(p).requires_grad_(False)
        twin = synchronised(copy.deepcopy(net))
        assert not any(p.requires_grad for p in twin[1].parameters())
        for _ in range(3):
            x = torch.rand(5, 3, 6, 6)
            torch.testing.assert_close(twin(x), net(x))
        assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=1e-12)


def test_synchronised_batchnorm_in_bf16() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).float()
    twin = synchronised(copy.deepcopy(net))
    x = torch.rand(5, 3, 6, 6).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = twin(x), net(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(twin[1].running_var, net[1].running_var)


def synchronised(net: torch.nn.Module) -> Any:
    """As among several processes, here one."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", address, rank=0, world_size=1)
    try:
        made = distributed.synchronise_batchnorm(net)
    finally:
        dist.destroy_process_group()
    assert type(made[1]) is not torch.nn.BatchNorm2d  # type: ignore[index]
    return made


def resume_in_two(out: str, over: Tree, rank: int, world: int, port: int) -> None:
    """Train to the end, in one go or stopped in the middle of the second epoch and resumed.

    The one hardly ever saves, the other after every step, and both collapse once in the third.
    """
    torch.set_num_threads(1)
    as_one_of(world, rank, port)
    yopo.runs.trainer.CHECK_EVERY = 1
    for name, stop_at in (("whole", None), ("pieces", (1, 3))):
        folder = Path(out).parent / name
        often = 0 if stop_at else 1e6
        over = over | {"checkpoint": {"minutes": often, "pause": often}}
        trainer = collapsing(folder, over)
        real = trainer._step

        def step(
            x: Tensor,
            y: Tensor,
            number: int,
            trainer: yopo.runs.trainer.Trainer = trainer,
            real: Any = real,
            stop_at: object = stop_at,
        ) -> yopo.Step:
            trainer.stop = (trainer.progress.epoch, number) == stop_at
            result: yopo.Step = real(x, y, number)
            return result

        trainer._step = step  # type: ignore[method-assign]
        try:
            trainer.run()
            assert stop_at is None
        except StopRequested:
            trainer = collapsing(folder, over)
            assert trainer.resume()
            assert (trainer.progress.epoch, trainer.progress.step) == (1, 4)
            trainer.run()
        assert trainer.progress.rollbacks == 1
    tensor_files.save_weights(Path(out), {"done": torch.ones(1)}, {})


def collapsing(folder: Path, over: Tree) -> yopo.runs.trainer.Trainer:
    trainer = tiny_trainer(folder, over)

    def evaluate(*_: object) -> tuple[float, float]:
        p = trainer.progress
        return (0.1 if (p.epoch, p.rollbacks) == (2, 0) else 0.9), 0.1

    trainer.images.chance = 0.1
    trainer.epoch_end.evaluate = evaluate  # type: ignore[method-assign, assignment]
    return trainer


@pytest.mark.parametrize("method", ["free", "pgd"])
def test_two_processes_resume_in_the_middle_of_an_epoch_exactly(
    method: str, tmp_path: Path
) -> None:
    """With BatchNorm that is not synchronised, and a perturbation carried over by Free."""
    over: Tree = {
        "ema": 0,
        "method": METHODS[method],
        "model": BATCHNORM["model"],
    }
    run(tmp_path, over, 2, resume_in_two)
    whole, pieces = (
        tensor_files.load_weights(tmp_path / name / "model-last.safetensors")
        for name in ("whole", "pieces")
    )
    assert all(torch.equal(value, pieces[key]) for key, value in whole.items())
    lines = [
        [
            {k: v for k, v in line.items() if "seconds" not in k}
            for line in seals.read_lines(tmp_path / name / "metrics.jsonl")[0]
        ]
        for name in ("whole", "pieces")
    ]
    assert lines[0] == lines[1]


def drift_apart(out: str, over: Tree, rank: int, world: int, port: int) -> None:
    """In the second epoch a weight of the second process, or of its average, is changed."""
    torch.set_num_threads(1)
    as_one_of(world, rank, port)
    for every in (1, 50):  # steps between checkpoints: seen in the middle of an epoch, at its end
        for whose in ("model", "follower"):
            yopo.runs.trainer.CHECK_EVERY = every
            folder = Path(out).parent / f"{every} {whose}"
            trainer = tiny_trainer(folder, over)
            real, there = trainer._step, dict[str, bytes]()

            def step(
                x: Tensor,
                y: Tensor,
                number: int,
                trainer: yopo.runs.trainer.Trainer = trainer,
                real: Any = real,
                there: dict[str, bytes] = there,
                folder: Path = folder,
                whose: str = whose,
            ) -> yopo.Step:
                result: yopo.Step = real(x, y, number)
                if (trainer.progress.epoch, number) == (1, 2):
                    there |= contents(folder) if rank == 0 else {}
                    if rank == 1:
                        next(getattr(trainer.learner, whose).parameters()).detach().view(-1)[0] += 1
                return result

            trainer._step = step  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="the weights of process 1 are no longer"):
                trainer.run()
            if rank == 0:
                assert "metrics.jsonl" in there
                assert contents(folder) == there
    tensor_files.save_weights(Path(out), {"done": torch.ones(1)}, {})


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_weights_that_differ_end_the_run_before_anything_is_written(tmp_path: Path) -> None:
    over: Tree = {"checkpoint": {"minutes": 0, "pause": 0}, "method": {"name": "fast"}}
    run(tmp_path, over, 2, drift_apart)


SHORT: Tree = {"method": {"name": "natural"}, "ema": 0, "batch": 4, "epochs": 2}  # 25 steps each
PAUSE = 0.1  # a slow step's


def ask_to_stop(out: str, over: Tree, rank: int, world: int, port: int) -> None:
    """In steps that are slow in the first process the second one is asked to stop."""
    torch.set_num_threads(1)
    as_one_of(world, rank, port)
    asking.SECONDS = 4 * PAUSE
    trainer, asked = tiny_trainer(Path(out).parent / "stops", over), 6
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        time.sleep(0 if rank else PAUSE)
        trainer.stop = number >= asked and rank == 1
        return real(x, y, number)

    trainer._step = step  # type: ignore[method-assign]
    with pytest.raises(StopRequested) as stop:
        trainer.run()
    assert stop.value.saved
    assert asked < trainer.progress.step <= asked + 1 + 4
    tensor_files.save_weights(Path(out), {"step": torch.tensor(trainer.progress.step)}, {})


def test_several_processes_stop_within_seconds_at_the_same_step(tmp_path: Path) -> None:
    """However slow the steps: torchrun waits 30 seconds, then it kills."""
    first, second = run(tmp_path, SHORT, 2, ask_to_stop)
    assert first["step"] == second["step"]


def lose_the_loss(out: str, over: Tree, rank: int, world: int, port: int) -> None:
    """In the second epoch of a run that asks at each step, and of one that hardly ever does."""
    torch.set_num_threads(1)
    as_one_of(world, rank, port)
    yopo.runs.trainer.CHECK_EVERY = 10
    for name, every in (("often", 0.0), ("rarely", 1e9)):
        asking.SECONDS = every
        trainer = tiny_trainer(Path(out).parent / name, over)
        real, steps = trainer._step, list[int]()

        def step(
            x: Tensor,
            y: Tensor,
            number: int,
            trainer: yopo.runs.trainer.Trainer = trainer,
            real: Any = real,
            steps: list[int] = steps,
        ) -> yopo.Step:
            result: yopo.Step = real(x, y, number)
            if trainer.progress.rollbacks == 0 and trainer.progress.epoch == 1:
                steps.append(number)
                if number == 3 and rank == 1:
                    result.loss.fill_(torch.nan)
            return result

        trainer._step = step  # type: ignore[method-assign]
        trainer.run()
        assert steps == [*range(10)]
        assert trainer.progress.rollbacks == 1
    tensor_files.save_weights(Path(out), {"done": torch.ones(1)}, {})


def test_how_often_they_ask_decides_nothing(tmp_path: Path) -> None:
    """Where a broken loss ends an epoch neither: what is asked by the clock is not looked at."""
    run(tmp_path, SHORT, 2, lose_the_loss)
    one, other = (
        tensor_files.load_weights(tmp_path / name / "model-last.safetensors")
        for name in ("often", "rarely")
    )
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize(("world", "batch"), [(1, 800), (2, 400)])
def test_the_held_out_attack_fits_where_a_share_of_the_batch_does(
    world: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32: None
) -> None:
    monkeypatch.setattr(distributed, "start", lambda _: (0, world))
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", address, rank=0, world_size=1)
    try:
        trainer = tiny_trainer(tmp_path, {"batch": 400}, train=420)
        used: list[int] = []
        real = suite.run

        def attack_all(*args: Any, **kwargs: Any) -> Any:
            used.append(kwargs["batch"])
            return real(*args, **kwargs)

        monkeypatch.setattr(measure, "attack_all", attack_all)
        trainer.epoch_end.evaluate(20)
        trainer._measure()
    finally:
        dist.destroy_process_group()
    assert used == [batch, batch]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_exchanges_run_over_nccl(alone: torch.device) -> None:
    """With a group of one: what two would add is not seen, but tensors and types are right."""
    net = yopo.models.preactresnet18(width=4, blocks=(1, 1)).to(alone)
    distributed.same_everywhere([*net.parameters(), *net.buffers()])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    yopo.exchange_gradients(optimizer)
    synced = distributed.synchronise_batchnorm(net)
    assert any(isinstance(m, torch.nn.SyncBatchNorm) for m in synced.modules())
    x = torch.rand(8, 3, 16, 16, device=alone)
    y = torch.arange(8, device=alone)
    yopo.YOPO(synced, yopo.Linf(0.03), m=2, n=2).backward(x, y)
    optimizer.step()
    assert distributed.from_first([1.5, 2.5]) == [1.5, 2.5]
    assert distributed.summed(torch.tensor([3.0], device=alone)).item() == 3
    assert torch.equal(distributed.gathered(x)[0], x.cpu())
    dist.barrier()


@pytest.mark.parametrize(
    "backend",
    [
        "gloo",
        pytest.param("nccl", marks=GPU),
    ],
)
@pytest.mark.parametrize("name", ["yopo", "free"])
def test_a_whole_run_makes_its_exchanges_over(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes itself for one of two, alone in its group."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(distributed, "start", lambda _: (0, 2))
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, rank=0, world_size=1, device_id=device if backend == "nccl" else None
    )
    try:
        method: Tree = {"name": "yopo", "m": 2, "n": 2, "first_layer": "layer1"}
        method = method if name == "yopo" else METHODS[name]
        base = {k: v for k, v in BASE.items() if k not in ("method", "model")}
        config = validate(overlay(overlay(base, BATCHNORM), {"method": method, "ema": 0.9}))
        trainer = yopo.runs.trainer.Trainer(config, tiny_data(), tmp_path, Silent(), device)
        counted = count_exchanges(monkeypatch)
        result = trainer.run()
        assert counted["all_reduce"] >= config.epochs * len(trainer.loader)
        assert counted["broadcast"] > 0
        assert 0 <= result["last"]["pgd-3"] <= result["last"]["clean"] <= 1
        if name == "yopo":  # Free's perturbation would be shared out between two
            again = yopo.runs.trainer.Trainer(config, tiny_data(), tmp_path, Silent(), device)
            assert again.resume()
            assert again.progress.epoch == config.epochs
            assert_same(again.learner.model.state_dict(), trainer.learner.model.state_dict(), tol=0)
    finally:
        dist.destroy_process_group()
        torch.set_default_dtype(torch.float64)


def count_exchanges(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each collective is called from now on."""
    counted = {"all_reduce": 0, "broadcast": 0}
    for name in counted:
        real = getattr(dist, name)

        def call(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            counted[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(dist, name, call)
    return counted
