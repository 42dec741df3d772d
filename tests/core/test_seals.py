"""The secret that keyed checksums are made with: made once, kept to oneself."""

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from yopo.core import seals


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_it_is_made_once_and_nobody_else_reads_it(home: Path) -> None:
    before = os.umask(0)
    try:
        first = seals.secret()
    finally:
        os.umask(before)
    (file,) = (home / ".cache" / "yopo").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_bytes() == first == seals.secret()
    assert len(first) == 32
    file.unlink()
    assert seals.secret() != first


def test_several_at_once_have_one(home: Path) -> None:
    """Processes share no more than threads do here: the folder. All of them find none."""

    def ask(barrier: Barrier) -> bytes:
        barrier.wait()
        return seals.secret()

    with ThreadPoolExecutor(8) as crew:
        for turn in range(20):
            (home / ".cache" / "yopo" / "secret").unlink(missing_ok=True)
            assert len({*crew.map(ask, [Barrier(8)] * 8)}) == 1, turn
            assert [f.name for f in (home / ".cache" / "yopo").iterdir()] == ["secret"]


def _file(home: Path) -> None:
    (home / ".cache").write_text("a file")


def _short(home: Path) -> None:
    (home / ".cache" / "yopo").mkdir(parents=True)
    (home / ".cache" / "yopo" / "secret").write_bytes(b"cut")


def _pipe(home: Path) -> None:
    (home / ".cache" / "yopo").mkdir(parents=True)
    os.mkfifo(home / ".cache" / "yopo" / "secret")


@pytest.mark.parametrize("spoil", [_file, _short, _pipe])
def test_where_it_cannot_be_kept_is_said(spoil: Callable[[Path], None], home: Path) -> None:
    spoil(home)
    with pytest.raises(OSError, match=r"no secret can be kept in .*\.cache/yopo/secret \("):
        seals.key_for("x")


def test_a_key_is_of_one_thing(home: Path) -> None:
    keys = {seals.key_for(*what) for what in (("a",), ("b",), ("a", "b"), ("b", "a"))}
    assert len(keys) == 4
    assert len({seals.keyed("digest", key) for key in keys} | {seals.keyed("digest", b"")}) == 5
