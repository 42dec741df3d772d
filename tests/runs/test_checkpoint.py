"""Whole or not at all, checked, never pickled."""

import errno
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Disk
from tests.tiny import forkserver
from yopo.core import tensor_files
from yopo.runs import state
from yopo.runs.state import Checkpoint

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}


def save(folder: Path, number: int, keep: int = 3) -> None:
    tensors = {k: v + number for k, v in TENSORS.items()}
    state.save(folder, number, Checkpoint(tensors, {"number": number}), keep=keep)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    values = {"x": 0.1 + 0.2, "n": 3, "s": ["a", None]}
    state.save(tmp_path, 1, Checkpoint(TENSORS, values, best={"w": torch.ones(2)}), keep=1)
    found = state.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.values == values
    assert all(torch.equal(found.tensors[k], v) for k, v in TENSORS.items())
    assert found.tensors["b"].dtype == torch.int64
    assert found.good is None
    assert found.best is not None
    assert torch.equal(found.best["w"], torch.ones(2))


def test_it_outlasts_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    """Also its name, and that of the folder of checkpoints where there was none."""
    folder = tmp_path / "state"
    state.save(folder, 1, Checkpoint(TENSORS, {"x": 1}, best={"w": torch.ones(2)}), keep=1)
    there = {f.name: f.read_bytes() for f in (folder / "save-000001").iterdir()}
    assert len(there) == 4
    for name, content in there.items():
        assert disk.read(tmp_path, "state", "save-000001", name) == content
    assert not disk.has(tmp_path, "state", state.WRITING)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for number in range(1, 8):
        save(tmp_path, number, keep=2)
    assert [p.name for p in state.saved(tmp_path)] == ["save-000007", "save-000006"]


@pytest.mark.parametrize("file", ["tensors.safetensors", "values.json", "seal.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    file: str, damage: str, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    victim = tmp_path / "save-000002" / file
    content = victim.read_bytes()
    if damage == "truncate":
        victim.write_bytes(content[:-3])
    elif damage == "flip":
        victim.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    else:
        victim.unlink()
    warnings: list[str] = []
    found = state.load_newest(tmp_path, warnings.append)
    assert found is not None
    assert found.values == {"number": 1}
    assert len(warnings) == 1
    assert "save-000002 is damaged" in warnings[0]


def test_none_left_is_none(tmp_path: Path) -> None:
    assert state.load_newest(tmp_path / "nowhere", pytest.fail) is None


def test_a_full_disk_fails_the_save_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    real = os.fsync
    calls = 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["save-000001"]
    found = state.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.values == {"number": 1}


def save_beyond_the_limit(folder: str) -> None:
    """Writes over 100 kB fail in this process, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    large = {"a": torch.zeros(50_000)}
    with pytest.raises(OSError, match="too large"):
        state.save(Path(folder), 2, Checkpoint(large, {"number": 2}), keep=2)
    with pytest.raises(OSError, match="too large"):
        tensor_files.save_weights(Path(folder) / "model.safetensors", large, {})


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    save(tmp_path, 1)
    context = forkserver()
    process = context.Process(target=save_beyond_the_limit, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["save-000001"]
    found = state.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.values == {"number": 1}


def test_a_half_written_one_is_never_seen(tmp_path: Path) -> None:
    save(tmp_path, 1)
    half = tmp_path / ".writing"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert [p.name for p in state.saved(tmp_path)] == ["save-000001"]
    save(tmp_path, 2)
    assert not half.exists()


class Bomb:
    """Says so if it is ever unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("kind", ["pickle", "torch", "old torch"])
def test_pickles_are_refused_unread(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(ValueError, match=r"is a pickle.*was not read"):
        tensor_files.load_weights(path)
    assert not (tmp_path / "exploded").exists()


def test_weights_round_trip_and_garbage(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor_files.save_weights(path, TENSORS, {"yopo": "0"})
    assert torch.equal(tensor_files.load_weights(path)["a"], TENSORS["a"])
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    path.write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        tensor_files.load_weights(path)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 0x4B50])
def test_a_header_as_long_as_a_pickles_first_bytes_is_no_pickle(
    tmp_path: Path, length: int
) -> None:
    path = tmp_path / "net.safetensors"
    for pad in range(length - 320, length):
        tensor_files.save_weights(path, TENSORS, {"x": "-" * pad})
        if int.from_bytes(path.read_bytes()[:8], "little") == length:
            break
    else:
        pytest.fail("no header of this length")
    assert torch.equal(tensor_files.load_weights(path)["a"], TENSORS["a"])
    assert tensor_files.load_metadata(path)["x"] == "-" * pad


def test_files_have_the_users_own_mode_and_equal_weights_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    for name in ("a", "b"):
        tensor_files.save_weights(tmp_path / name, TENSORS, {"config": "{}"})
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "text").stat().st_mode
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_text_is_utf8_in_every_locale(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from yopo.core import files; "
        "files.write_text(pathlib.Path(sys.argv[1]), 'L\\u221e')"
    )
    env = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=env, check=True)
    assert (tmp_path / "a").read_text("utf-8") == "L∞"
