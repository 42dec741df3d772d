"""MNIST and CIFAR-10 from the archives of those who made them, with Python's own urllib."""

import http.client
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from yopo.data.formats import OF_A_FILE, read_idx_file
from yopo.data.sources import CIFAR_BATCHES, IDX_FILES, KEYS

PLACES = {  # tried in this order
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
}
MOST = {"mnist": 16 << 20, "cifar10": 256 << 20}  # bytes of one file; there are 10 and 170 million
SILENCE = 30  # seconds without a byte, after which a server is given up
PART = 1 << 20  # bytes that are read at once
OFTEN = 16 << 20  # bytes between lines about a long download
RECORD = 1 + 3 * 32 * 32  # bytes of CIFAR-10's binary version: a label, then red, green, blue
Raw = dict[str, NDArray[Any]]
Say = Callable[[str], object]


def host(place: str) -> str:
    """Whose door it is, for messages."""
    return urlsplit(place).netloc


def from_archive(name: str, place: str, say: Say) -> Raw:
    """The data set from one of its `PLACES`; whoever asks checks every pixel."""
    say(f"{name}: fetching {place}")
    with tempfile.TemporaryDirectory(prefix="yopo-") as folder:
        if name == "mnist":
            return _mnist(place, Path(folder), say)
        archive = Path(folder) / "cifar.tar.gz"
        download(place, archive, MOST[name], lambda words: say(f"{name}: {words}"))
        return read_binary(archive)


def _mnist(place: str, folder: Path, say: Say) -> Raw:
    """The four files, packed with gzip."""
    raw: Raw = {}
    for key, file in zip(KEYS, IDX_FILES, strict=True):
        path = folder / f"{file}.gz"
        download(f"{place}/{path.name}", path, MOST["mnist"], lambda words: say(f"mnist: {words}"))
        raw[key] = read_idx_file(path)
    return raw


def read_binary(archive: Path) -> Raw:
    """CIFAR-10's binary version, in which nothing is pickled."""
    names = [f"cifar-10-batches-bin/{batch}.bin" for batch in CIFAR_BATCHES]
    batches = []
    for name, content in zip(names, members(archive, names), strict=True):
        if not content or len(content) % RECORD:
            raise ValueError(f"expected rows of {RECORD} bytes in {name}, got {len(content)} bytes")
        batches.append(np.frombuffer(content, np.uint8).reshape(-1, RECORD))
    train, test = np.concatenate(batches[:-1]), batches[-1]
    rows = {"train": train, "test": test}
    images = {f"x_{s}": r[:, 1:].reshape(-1, 3, 32, 32) for s, r in rows.items()}
    return images | {f"y_{s}": r[:, 0] for s, r in rows.items()}


def members(archive: Path, names: list[str]) -> list[bytes]:
    """Files from a .tgz, read in one pass and never unpacked to disk."""
    content: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name in names and (file := tar.extractfile(member)) is not None:
                content[member.name] = file.read(OF_A_FILE)
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"expected {', '.join(missing)} in the package, got none")
    return [content[name] for name in names]


def download(address: str, into: Path, most: int, say: Say) -> None:
    """A whole file of at most so many bytes, or an error; a silent server is given up."""
    request = urllib.request.Request(address, headers={"User-Agent": "yopo-torch"})
    got, told, length = 0, OFTEN, None
    try:
        with (
            urllib.request.urlopen(request, timeout=SILENCE) as answer,
            into.open("wb") as file,
        ):
            words = answer.headers.get("Content-Length", "")
            length = int(words) if words.isdigit() else None
            while (length or 0) <= most and got <= most and (part := answer.read(PART)):
                file.write(part)
                got += len(part)
                if got >= told:
                    say(f"{got / 1e6:.0f}{f' of {length / 1e6:.0f}' if length else ''} MB")
                    told += OFTEN
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{address}: {error or type(error).__name__}") from None
    if max(got, length or 0) > most:
        raise ValueError(f"{address} has more than {most:,} bytes, so it is something else")
    if length is not None and got != length:
        raise OSError(f"{address} was cut off after {got:,} of {length:,} bytes")
