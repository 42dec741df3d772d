"""Checkpoints that several processes write together: checked before they are read, no pickles."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yopo
from tests.runs.test_checkpoint import Bomb
from tests.tiny import PATIENCE, forkserver, free_port
from yopo.core import tensor_files
from yopo.core.files import file_digest
from yopo.runs import shards, state
from yopo.runs.snapshot import Snapshot
from yopo.runs.state import Checkpoint

STEPS = 3
VALUES = {"number": 7}


def network() -> nn.Module:
    """Layers that two processes share unevenly, the last so that one of them has nothing of it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 1))
    return net.double()


def snapshot(
    steps: int = STEPS,
    *,
    spread: bool = False,
    tensor_parallel: bool = False,
    averaged: bool = False,
) -> Snapshot:
    """After a few steps of AdamW, so that its state is there, on the same batch everywhere."""
    net = network()
    method = yopo.Natural(net)
    if tensor_parallel:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "3": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    ema = yopo.EMA(net, 0.5) if averaged else None
    if spread:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
        if ema:
            fully_shard(ema.model)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5)
    for _ in range(steps):
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Snapshot(net, ema, optimizer, method)


def joined(rank: int, world: int, port: int) -> Any:
    """One of a group, and its group for checkpoints."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=world)
    return dist.new_group(backend="gloo")


def reading(taken: Snapshot, group: Any) -> state.Reading:
    def everyone(mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group)
        return found

    return state.Reading(taken.layout(), dist.get_rank(), dist.get_world_size(), everyone)


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in tensors.items()}


def two(folder: str, rank: int, port: int) -> None:
    """All that needs two processes, in one start of them."""
    group = joined(rank, 2, port)
    at, other = Path(folder), Path(folder) / "one"
    taken = snapshot(spread=True)
    assert taken.is_sharded
    assert taken.is_finite()
    tensors = taken.copy()
    best = {"w": torch.arange(3.0)} if rank == 0 else None  # the first process alone has it
    checkpoint = Checkpoint(tensors, VALUES, good=tensors, best=best)
    state.save_shards(at / "two", 1, checkpoint, keep=2, group=group)
    dist.barrier()

    # Back in other processes of the same number, bit for bit.
    again = snapshot(0, spread=True)
    found = state.load(state.saved(at / "two")[0], read=reading(again, group))
    assert found.values == VALUES
    again.put_back(found.tensors)
    assert_equal(whole(again.take()), whole(tensors))
    assert found.good is not None
    assert_equal(whole(found.good), whole(tensors))

    # Each has BatchNorm's statistics of its own, and averages of them.
    taken = snapshot(spread=True, averaged=True)
    assert taken.ema
    for number, buffer in enumerate([*taken.model.buffers(), *taken.ema.model.buffers()]):
        buffer += 10 * number + rank
    tensors = taken.copy()
    own = {k: v for k, v in tensors.items() if "running" in k or "batches" in k}
    of_all = Checkpoint(taken.gathered(taken.copy()), VALUES)
    state.save_shards(at / "own", 1, of_all, keep=1, group=group)
    dist.barrier()
    again = snapshot(0, spread=True, averaged=True)
    found = state.load(state.saved(at / "own")[0], read=reading(again, group))
    again.put_back(again.own(found.tensors, rank, 2))
    assert_equal(whole(again.take()), whole(tensors))
    assert len(own) == 6

    # A checkpoint that one process wrote, whole: each takes its part.
    again = snapshot(0, spread=True)
    found = state.load(state.saved(other)[0], read=reading(again, group))
    again.put_back(found.tensors)
    assert_equal(whole(again.take()), tensor_files.load_weights(at / "expected"))

    # Tensor parallelism cuts a weight by its columns, and keeps a bias in both.
    taken = snapshot(tensor_parallel=True)
    tensors = taken.copy()
    state.save_shards(at / "columns", 1, Checkpoint(tensors, VALUES), keep=1, group=group)
    dist.barrier()
    again = snapshot(0, tensor_parallel=True)
    found = state.load(state.saved(at / "columns")[0], read=reading(again, group))
    again.put_back(found.tensors)
    assert_equal(whole(again.take()), whole(tensors))
    if rank == 0:
        tensor_files.save_weights(at / "of columns", whole(tensors), {})
    else:
        whole(tensors)
    again = snapshot(0, spread=True)  # by rows, in another run
    found = state.load(state.saved(at / "columns")[0], read=reading(again, group))
    again.put_back(found.tensors)
    assert_equal(whole(again.take()), whole(tensors))

    # What one of them cannot write, or finds damaged, both hear of.
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shards, "write_tensors", full)
        with pytest.raises(OSError, match="No space left on device"):
            state.save_shards(at / "two", 2, checkpoint, keep=2, group=group)
    dist.barrier()
    assert [path.name for path in (at / "two").iterdir()] == ["save-000001"]
    dist.barrier()  # the first one begins the next before the other has looked
    state.save_shards(at / "two", 2, checkpoint, keep=2, group=group)
    if rank == 0:
        flip(at / "two" / "save-000002" / "shard-00001.safetensors")
    dist.barrier()
    said: list[str] = []
    back = state.load_newest(at / "two", said.append, reading(again, group))
    assert back is not None
    assert len(said) == 1
    assert "save-000002 is damaged (shard-00001.safetensors was altered)" in said[0]

    # A weight that is NaN in one of them is seen by both.
    with torch.no_grad():
        if rank == 1:
            weight: Any = again.model.get_parameter("0.weight")
            weight.to_local()[0] = torch.nan
    assert not again.is_finite()
    dist.destroy_process_group()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote, after all their checks passed."""
    folder = tmp_path_factory.mktemp("shards")
    alone = snapshot()
    state.save(folder / "one", 1, Checkpoint(alone.copy(), VALUES), keep=1)
    tensor_files.save_weights(folder / "expected", alone.copy(), {})
    context, port = forkserver(), free_port()
    pair = [context.Process(target=two, args=(str(folder), rank, port)) for rank in (0, 1)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return folder


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(written / "two" / "save-000001", tmp_path / "save-000001"))


def test_two_processes_that_share_the_tensors_out_save_and_resume(written: Path) -> None:
    assert sorted(file.name for file in (written / "two" / "save-000001").iterdir()) == [
        "seal.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "values.json",
    ]


def test_one_process_goes_on_from_what_was_cut_by_columns(written: Path) -> None:
    found = state.load(state.saved(written / "columns")[0])
    again = snapshot(0)
    again.put_back(found.tensors)
    assert_equal(again.take(), tensor_files.load_weights(written / "of columns"))


def test_one_process_goes_on_from_what_two_wrote(written: Path, path: Path) -> None:
    found = state.load(path)
    assert found.values == VALUES
    again = snapshot(0)
    again.put_back(found.tensors)
    # Shared out or not, the same steps: what is summed in another order differs in the last bits.
    expected = tensor_files.load_weights(written / "expected")
    torch.testing.assert_close(again.take(), expected, rtol=0, atol=1e-12)
    assert found.best is not None
    assert torch.equal(found.best["w"], torch.arange(3.0))


def reseal(path: Path) -> None:
    """As one who wants to deceive would."""
    sums = {f.name: file_digest(f) for f in path.iterdir() if f.name != "seal.json"}
    (path / "seal.json").write_text(json.dumps(sums))


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's own metadata file, lying there with a true checksum, is not looked at."""
    monkeypatch.chdir(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    reseal(path)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    assert state.load(path).values == VALUES
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_in_a_shards_place_is_refused_unread(
    kind: str, sealed: bool, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    victim = path / "shard-00001.safetensors"
    victim.write_bytes(pickle.dumps(Bomb()))
    if kind == "torch":
        torch.save(Bomb(), victim)
    if sealed:
        reseal(path)
    with pytest.raises(ValueError, match="is a pickle.*was not read" if sealed else "was altered"):
        state.load(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("file", ["shard-00000.safetensors", "values.json", "seal.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_seen_before_anything_is_read(
    file: str, damage: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(shards, "read", read)
    victim = path / file
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-3])
    elif damage == "flip":
        flip(victim)
    else:
        victim.unlink()
    with pytest.raises(ValueError, match="save-000001 is damaged"):
        state.load(path)


def test_every_flipped_bit_of_a_header_is_seen(path: Path) -> None:
    """torch's own reader takes another dtype, or another place, for what was saved."""
    victim = path / "shard-00000.safetensors"
    content = victim.read_bytes()
    for at in range(0, int.from_bytes(content[:8], "little") + 8, 29):
        victim.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="was altered"):
            state.load(path)


def test_a_shard_that_the_seal_does_not_name_is_refused(path: Path) -> None:
    shutil.copy(path / "shard-00000.safetensors", path / "shard-00002.safetensors")
    with pytest.raises(ValueError, match=r"seal.json has no shard-00002.safetensors"):
        state.load(path)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({"saved_offsets": [10**15, 0]}, "do not add up"),
        ({"saved_offsets": [-3, 0]}, "do not add up"),
        ({"saved_offsets": "no"}, "cannot be put together"),
        ({"saved_offsets": [0]}, "cannot be put together"),
        ({}, "cannot be put together"),
        (3, "cannot be put together"),
    ],
)
def test_shards_that_say_absurd_things_are_refused_in_a_sentence(
    offsets: object, said: str, path: Path
) -> None:
    """Sealed again: no room is made for what a header says beyond what the file holds."""
    victim = path / "shard-00001.safetensors"
    words = tensor_files.load_metadata(victim)
    told = json.loads(words[shards.OFFSETS])
    told["tensors/model.0.weight"] = offsets
    tensors = tensor_files.load_tensors(victim)
    tensor_files.write_tensors(tensors, victim, {shards.OFFSETS: json.dumps(told)})
    reseal(path)
    with pytest.raises(ValueError, match=f"save-000001 is damaged .*{said}"):
        state.load(path)


def test_a_shard_without_the_others_is_refused(path: Path) -> None:
    (path / "shard-00000.safetensors").unlink()
    reseal(path)
    with pytest.raises(ValueError, match="do not add up"):
        state.load(path)


def test_nothing_is_read_of_values_that_are_none(path: Path) -> None:
    (path / "values.json").write_text("[]")
    reseal(path)
    with pytest.raises(ValueError, match="holds no values"):
        state.load(path)
    os.unlink(path / "values.json")
    reseal(path)
    with pytest.raises(ValueError, match="lacks a checksum"):
        state.load(path)
