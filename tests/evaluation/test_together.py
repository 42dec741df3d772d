"""Batches dealt out to two processes (gloo): the results of one, bit for bit."""

import copy
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import yopo
from tests.robust import EPS, trained
from tests.tiny import PATIENCE, as_one_of, in_two, tiny_trainer
from yopo.core.crew import ALONE, Crew
from yopo.evaluation import images, network
from yopo.runs.progress import StopRequested

NAMES = ["pgd-2-2", "apgd-ce"]  # apgd's random numbers depend on the whole batch
AGAIN = ["pgd-2-2", "cw-linf-2"]
WORLD = 2


def met(rank: int, port: int) -> None:
    """A group of two."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    as_one_of(WORLD, rank, port)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", address, patience, WORLD, rank)


def batches(n: int = 40) -> list[tuple[Tensor, Tensor]]:
    _, x, y = trained()
    return list(zip(x[:n].split(9), y[:n].split(9), strict=True))


def evaluated(names: list[str], **options: Any) -> yopo.Result:
    """In batches of 8, of which the last one is small and the number odd."""
    return yopo.evaluate(trained()[0], batches(), yopo.Linf(EPS), names, batch=8, **options)


def found(result: yopo.Result) -> dict[str, Any]:
    """All that is not a time."""
    return {
        "correct": result.correct,
        "index": {n: o.index for n, o in result.outcomes.items()},
        "images": {n: o.images for n, o in result.outcomes.items()},
        "propagations": result.propagations,
        "warnings": [w.text for w in result.warnings],
        "about": {k: result.about[k] for k in ("weights_sha256", "images_sha256", "images")},
    }


class Interrupted(Exception):  # noqa: N818
    pass


def work(rank: int, port: int, out: str) -> None:
    """In one of the two."""
    images.HOLD = 1  # batches are gone over anew, in each process
    met(rank, port)
    kept: dict[str, Any] = {}
    told: list[tuple[str, float, float]] = []
    go = partial(evaluated, together=True, progress=lambda *words: told.append(words))
    passed, real = [0], network.Network.forward

    def forward(self: network.Network, x: Tensor) -> Tensor:
        passed[0] += len(x)
        return real(self, x)

    network.Network.forward = forward  # type: ignore[method-assign]
    kept["found"], kept["told"] = found(go(NAMES, examples=True)), list(told)
    kept["passed"] = passed[0]

    def stop(name: str, part: float, _accuracy: float) -> None:
        if name == "cw-linf-2" and part:  # everywhere at the same moment
            raise Interrupted

    state = Path(out) / "state"
    with pytest.raises(Interrupted):
        go(AGAIN, examples=True, state=state, progress=stop, checks=False)
    kept["files"] = len(list(state.rglob("*.safetensors")))
    result = go(AGAIN, examples=True, state=state, checks=False)
    kept["resumed"] = found(result)
    dist.barrier()
    result.forget()
    kept["failures"] = [failing(rank, at) for at in ("attack", "data", "settings", "labels")]
    kept["blocks"] = of_pictures(rank, Pictures())
    kept["unreadable"] = of_pictures(rank, Pictures(broken=14 if rank == 1 else None))
    kept["another"] = of_pictures(rank, Pictures(other=rank == 1))
    kept["spread"] = spread()
    kept["stopped"] = stopped(rank, Path(out) / "run")
    dist.destroy_process_group()
    torch.save(kept, Path(out) / f"{rank}.pt")


def failing(rank: int, at: str) -> tuple[str, float]:
    """What each process says when the second one fails, and after how many batches."""
    done = 0

    def attack(_net: nn.Module, x: Tensor, *_: object) -> Tensor:
        nonlocal done
        done += 1
        if rank == 1 and at == "attack" and done == 2:
            raise ArithmeticError("the second batch")
        return x

    data, seed = batches(), 0
    if rank == 1 and at == "data":
        data = [(x - 1, y) for x, y in data]
    if rank == 1 and at == "settings":
        seed = 1
    if rank == 1 and at == "labels":
        data = [(x, (y + 1) % 10) for x, y in data]
    began = time.monotonic()
    with pytest.raises((RuntimeError, ArithmeticError, ValueError)) as caught:
        yopo.evaluate(
            trained()[0],
            data,
            yopo.Linf(EPS),
            [attack],
            batch=5,
            seed=seed,
            checks=False,
            together=True,
        )
    assert time.monotonic() - began < PATIENCE / 2
    return f"{type(caught.value).__name__}: {caught.value}", done


class Pictures:
    """40 of them that say which were read."""

    def __init__(self, broken: int | None = None, other: bool = False) -> None:
        _, x, y = trained()
        self.x, self.labels = (255 * x[:40]).round().byte() + other, y[:40]
        self.shape, self.reads, self.broken = tuple(x.shape[1:]), list[int](), broken

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> Tensor:
        if self.broken in rows.tolist():
            raise ValueError("photos/14.jpg is damaged")
        self.reads += rows.tolist()
        return self.x[rows]


def in_blocks(data: Pictures, batch: int, **how: Any) -> yopo.Result:
    """With images hashed six by six."""
    before, images.BLOCK = images.BLOCK, 6 * data.x[0].numel()
    try:
        model = trained()[0]
        return yopo.evaluate(model, data, yopo.Linf(EPS), batch=batch, checks=False, **how)
    finally:
        images.BLOCK = before


def of_pictures(rank: int, data: Pictures) -> dict[str, Any]:
    """What was found and read, or said."""
    try:
        about = in_blocks(data, 4, attacks="clean", together=True).about
    except (RuntimeError, ValueError) as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"digest": about["images_sha256"], "reads": data.reads}


def spread() -> dict[str, Any]:
    """With weights that FSDP2 spreads: the passes of one process are not those of the other."""
    model = copy.deepcopy(trained()[0])
    fully_shard(model)
    result = yopo.evaluate(
        model, batches(), yopo.Linf(EPS), "pgd-2", batch=25, checks=False, together=True
    )
    return result.correct


def stopped(rank: int, out: Path) -> list[str]:
    """The second process alone is told to stop while held-out images are attacked."""
    trainer = tiny_trainer(out, {"epochs": 1})
    assert trainer.learner.world == WORLD
    seen: list[str] = []

    def attack(name: str, _part: float, _accuracy: float) -> None:
        seen.append(name)
        trainer.stop = rank == 1 and name.endswith("pgd-3")

    trainer.files.watch.attack = attack  # type: ignore[method-assign, assignment]
    with pytest.raises(StopRequested):
        trainer.run()
    return seen


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two(work, tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)  # as there: what is added up in another order rounds otherwise
    try:
        again = evaluated(AGAIN, examples=True, checks=False)
        return {"found": found(evaluated(NAMES, examples=True)), "resumed": found(again)}
    finally:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(a == pytest.approx(b) if isinstance(a, float) else a == b)


@pytest.mark.parametrize("which", ["found", "resumed"])
def test_two_processes_find_what_one_finds(
    which: str, pair: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    first, second = (each[which] for each in pair)
    expected = alone[which]
    assert sum(map(len, expected["index"].values())) > 5
    assert same(first, expected)
    assert all(shown is None for shown in second.pop("images").values())
    assert same(second, {k: v for k, v in expected.items() if k != "images"})


def test_each_makes_about_half_of_the_passes(pair: list[dict[str, Any]]) -> None:
    both = [each["passed"] for each in pair]
    assert max(both) < 0.6 * sum(both)


def test_progress_is_that_of_all(pair: list[dict[str, Any]]) -> None:
    first, second = (each["told"] for each in pair)
    assert first == second
    for name in ("clean", "pgd-2-2"):
        parts = [part for n, part, _ in first if n == name]
        assert parts == sorted(parts)
        assert parts[-1] == 1
        (*_, (_, _, last)) = [t for t in first if t[0] == name]
        assert last == pytest.approx(float(pair[0]["found"]["correct"][name].double().mean()))


def test_finished_batches_of_both_are_kept(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["files"] > 5


def test_an_error_in_one_ends_the_other_within_a_batch(pair: list[dict[str, Any]]) -> None:
    (attack, done), (data, _), (settings, _), (labels, _) = pair[0]["failures"]
    other = [said for said, _ in pair[1]["failures"]]
    assert attack.startswith("RuntimeError: process 1 met an error")
    assert done == 2
    assert other[0] == "ArithmeticError: the second batch"
    assert data.startswith("RuntimeError: process 1 met an error")
    assert "images in [0, 1]" in other[1]
    assert settings == other[2] == labels == other[3]
    assert "process 1 has a network, images or settings other than those of process 0" in settings


def test_each_reads_its_own_share_and_all_know_the_same_digest(pair: list[dict[str, Any]]) -> None:
    for each in pair:
        again = 1 + 1 + 1 + 1 + 8  # one is looked at four times, eight once
        assert len(each["blocks"]["reads"]) <= 2 * 40 / WORLD + 6 + again  # hashed, and attacked
    assert {*pair[0]["blocks"]["reads"], *pair[1]["blocks"]["reads"]} == {*range(40)}
    for batch in (3, 40):
        alone = in_blocks(Pictures(), batch, attacks="clean").about["images_sha256"]
        assert pair[0]["blocks"]["digest"] == pair[1]["blocks"]["digest"] == alone


def test_a_picture_that_one_cannot_read_ends_all(pair: list[dict[str, Any]]) -> None:
    first, second = (each["unreadable"]["said"] for each in pair)
    assert second == "ValueError: photos/14.jpg is damaged"
    assert first.startswith("RuntimeError: process 1 met an error")
    first, second = (each["another"]["said"] for each in pair)
    assert first == second
    assert "process 1 has a network, images or settings other than those of process 0" in first


def test_spread_weights_are_evaluated_by_all(pair: list[dict[str, Any]], float32: None) -> None:
    model = trained()[0]
    expected = yopo.evaluate(
        model, batches(), yopo.Linf(EPS), "pgd-2", batch=25, checks=False
    ).correct
    assert same(pair[0]["spread"], expected)
    assert same(pair[1]["spread"], expected)


def test_a_run_asked_to_stop_in_one_process_leaves_the_attack_in_both(
    pair: list[dict[str, Any]],
) -> None:
    assert pair[0]["stopped"] == pair[1]["stopped"]
    assert pair[0]["stopped"][-1] == "held-out pgd-3"


def test_alone_nothing_is_dealt_out() -> None:
    assert Crew.of_group() is ALONE
    assert ALONE.share([1, 2, 3]) == [1, 2, 3]
    assert list(ALONE.rounds(3, iter([4, 5, 6]))) == [(1, 4), (2, 5), (3, 6)]
