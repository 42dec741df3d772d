"""Two processes (gloo) whose --out is not one folder: refused in a sentence, in both at once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.tiny import BASE, as_one_of, in_two, tiny_data, tiny_trainer
from yopo.runs import state
from yopo.runs.api import compare_runs, configure, train_run
from yopo.runs.overlay import Tree, overlay
from yopo.runs.trainer import Trainer

NATURAL: Tree = {"method": {"name": "natural"}, "ema": 0, "epochs": 2}
WAYS = ("flat", "fsdp")
SPREAD = NATURAL | {"parallel": "fsdp"}


def refused(work: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        work()
    return str(error.value)


def resumed(folder: Path, over: Tree) -> Trainer:
    trainer = tiny_trainer(folder, over)
    assert trainer.resume()
    return trainer


def resuming(rank: int, at: Path) -> dict[str, Any]:
    """What two say that do not see the same checkpoints."""
    found: dict[str, Any] = {}
    for way in WAYS:
        over = NATURAL | {"parallel": way}
        found[f"{way} apart"] = refused(tiny_trainer(at / f"{way}-{rank}", over).run)
        mine = at / f"{way}-old-{rank}"
        tiny_trainer(at / way, over).run()
        if rank == 1:  # as a folder that another machine looks at too early
            shutil.copytree(at / way, mine)
            shutil.rmtree(state.saved(mine / "state")[0])
        dist.barrier()
        folder = at / way if rank == 0 else mine
        found[f"{way} stale"] = refused(lambda f=folder, o=over: resumed(f, o))  # type: ignore[misc]
        if rank == 1:  # what another run left there, of the same settings
            newest = state.saved(at / way / "state")[0].name
            shutil.copytree(state.saved(mine / "state")[-1], mine / "state" / newest)
        found[f"{way} other"] = refused(lambda f=folder, o=over: resumed(f, o))  # type: ignore[misc]
        again = resumed(at / way, over)
        found[f"{way} same"] = again.progress.epoch
        if rank == 1:  # more than the first one sees: what it sees is what there is
            shutil.copytree(at / way, at / f"{way}-more")
            more = at / f"{way}-more" / "state"
            shutil.copytree(state.saved(more)[0], more / "save-000009")
            shown = tiny_trainer(at / f"{way}-more", over)
        else:
            shown = tiny_trainer(at / way, over)
        assert shown.resume()
        found[f"{way} more"] = shown.progress.saves
    return found


def starting(rank: int, at: Path) -> dict[str, Any]:
    """What `train_run` and `compare_runs` make of folders that one finds taken."""
    tiny = {k: v for k, v in overlay(BASE, NATURAL).items() if k not in ("checkpoint", "schedule")}
    config = configure("demo", tiny, {"data": {"name": "npz", "path": str(at / "data.npz")}})
    out, found = at / f"taken-{rank}", dict[str, Any]()
    if rank == 0:  # there is none in the other
        shutil.copytree(at / "flat", out / "run")
    found["taken"] = refused(lambda: train_run(config, out / "run", device="cpu"))
    found["compared"] = refused(lambda: compare_runs({"run": config}, out, device="cpu"))
    if rank == 1:
        shutil.copytree(at / "flat", at / "left-1")
    left = at / f"left-{rank}"
    found["left"] = refused(lambda: train_run(config, left, device="cpu"))
    return found


def differing(rank: int, at: Path) -> dict[str, Any]:
    """What two say that were not given the same."""
    found: dict[str, Any] = {}
    rate = {"optimizer": {"lr": 0.1 + 0.1 * rank}}
    found["settings"] = refused(lambda: tiny_trainer(at / "none", overlay(SPREAD, rate)))
    place = tiny_trainer(at / "none", SPREAD)
    place.progress.updates += rank
    found["place"] = refused(place.run)
    data = tiny_data()
    data.x_train[0] += rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tiny.tiny_data", lambda _: data)
        found["data"] = refused(tiny_trainer(at / "none", SPREAD).run)
    return found


def work(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    as_one_of(2, rank, port)
    state.SEEN = 0.3
    at = Path(out)
    found = resuming(rank, at) | starting(rank, at) | differing(rank, at)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def found(at: Path) -> list[dict[str, Any]]:
    data, names = tiny_data(), ("x_train", "y_train", "x_test", "y_test")
    np.savez(at / "data.npz", **{name: getattr(data, name).numpy() for name in names})
    return in_two(work, at)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["apart", "stale", "other"])
def test_a_folder_that_one_does_not_see_is_refused(
    way: str, case: str, found: list[dict[str, Any]]
) -> None:
    """Before a step is made, and before a shard is read beside one of another checkpoint."""
    for each in found:
        said = each[f"{way} {case}"]
        assert "process 1 does not see in " in said
        assert "give an --out that all machines share" in said


@pytest.mark.parametrize("way", WAYS)
def test_the_first_ones_list_is_everybodys(way: str, found: list[dict[str, Any]]) -> None:
    assert [each[f"{way} same"] for each in found] == [2, 2]
    first, second = (each[f"{way} more"] for each in found)
    assert first == second < 9


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_the_look(way: str, at: Path, found: list[dict[str, Any]]) -> None:
    assert [path.name for path in (at / f"{way}-0" / "state").iterdir()] == []
    assert not [*(at / way).rglob(".*")]


def test_a_folder_is_taken_if_the_first_finds_it_so(found: list[dict[str, Any]]) -> None:
    first, second = found
    for name in ("taken", "compared"):
        assert "holds a run; add --resume to go on, or give another --out" in first[name]
        assert "process 0 met an error, so this one stopped, too" in second[name]
    assert all("process 1 does not see in " in each["left"] for each in found)


def test_processes_that_were_not_given_the_same_are_refused(found: list[dict[str, Any]]) -> None:
    """Of weights in parts nobody has another's to compare."""
    for each in found:
        assert (
            "process 1 was given other settings than process 0 (optimizer.lr)" in each["settings"]
        )
        for name in ("place", "data"):
            assert "process 1 would not train on from where process 0 does" in each[name]
