"""Damaged and hostile files for every reader, and what the reader makes of each.

A reader may succeed or say in a sentence what is wrong, as the command line does. A traceback, more
than SECONDS or more than GROWTH bytes of memory is a defect. `tools/fuzz.py` runs many of these,
`test_fuzz.py` a few.
"""

import base64
import copy
import gzip
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load as read_safetensors
from safetensors.torch import save

import yopo
from tests.hostile import write_full_run
from tests.tiny import Silent, tiny_data, tiny_trainer
from yopo import cli
from yopo.cli.training import settings_typed
from yopo.core import files, tensor_files
from yopo.data import load
from yopo.data.formats import PIXELS
from yopo.data.sources import CIFAR_BATCHES, IDX_FILES, KEYS
from yopo.models import SmallCNN
from yopo.runs import borrowed, exporting, shards, state
from yopo.runs.api import method_configs
from yopo.runs.overlay import Tree

SECONDS, GROWTH = 5.0, 500 << 20
Damage = bytes | str  # what the file holds, or what stands in its place
PLACES = ("folder", "pipe", "loop", "device", "nothing", "endless")
GONE = ("nothing", "loop")  # as if there were no file
Strategy = st.SearchStrategy[Damage]


@dataclass
class Reader:
    """A file, what may be wrong with it, and what reads it."""

    path: Path
    inputs: Strategy
    read: Callable[[], None]
    after: Callable[[], None] = field(default=lambda: None)  # once the damage is done
    whole: bytes = b""

    def __post_init__(self) -> None:
        self.whole = self.path.read_bytes()


# ---------------------------------------------------------------- what may be wrong

NUMBERS = (0, 1, -1, 2, 10**6, 10**9, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400)
FLOATS = (0.5, -0.5, 1.0, 1e-300, 5e-324, 1e17, 1e308, math.nan, math.inf, -math.inf)
TEXTS = (
    *("", "a", " ", "nan", "inf", "1e999", "8/255", "1e999999999/1", "1/0", "9" * 5000, "x" * 5000),
    *(
        "\0",
        "\ud800",
        "\x1b[2J",
        "\u202e",
        "*a",
        "[&a [1], *a]",
        "[" * 99,
        "2020-1-1",
    ),
    *("yopo", "pgd", "free", "linf", "l2", "npz", "folder", "cifar10", "mnist-subset", "timm:x"),
    *("os:system", "preactresnet18", "../../x", "/dev/zero", "http://x", "best", "last", "clean"),
    *("<b>", "{{1}}", "{0}", "%s", "[red]", "\N{GRINNING FACE}", "a\nb", "a\tb", "pgd-40", "cw"),
)
BRANCHES: tuple[Any, ...] = (
    [],
    {},
    [[]],
    {"a": 1},
    {"name": "pgd"},
    [0.1, 0.2],
    [1] * 300,
    [None],
    {"": None},
)
VALUES = st.one_of(
    st.sampled_from((None, True, False)),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(TEXTS),
    st.sampled_from(BRANCHES).map(copy.deepcopy),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
YAML_TEXTS = (
    "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]\n",
    "&a [*a]",
    "a: !!python/object/apply:os.system [id]",
    "a: !!set {a, b}\nb: !!binary aGk=\nc: 2020-01-01\n",
    "a: 2020-99-99",
    "1: 2\n",
    "? [a]\n: b",
    "a: 1\na: 2",
    "[" * 3000,
    "- " * 3000,
    "{a: " * 500,
    "<<: {a: 1}",
    "a: 1:" + "59:" * 400 + "1",
    "epochs: 1e999\nthreat: {eps: 1e999999999/3}",
    "seed: .nan",
    "a: |\n  " + "x" * 100_000,
    "%YAML 9.9\n---\na",
    "---\na\n---\nb",
    "a: \ttab",
)


WAYS = (*["nudge"] * 4, *["replace"] * 2, "delete", "double", "rename", "wrap", "move")
ALIKE: dict[type, tuple[Any, ...]] = {  # what may pass, and be met later
    bool: (True, False),
    int: (0, 1, 2, 3, 5, 10, 100, 10_000, 10**6),
    float: (0.0, 1.0, 0.5, 1e-8, 1e-3, 0.999, 5.0, 1e3, 1e9),
    str: TEXTS,
    list: ([], [0.5], [0.1, 0.9], [1.0, 0.0]),
    dict: ({}, {"clean": 0.5}, {"clean": 0.5, "pgd-3": 1.0}),
}


def paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in a tree."""
    yield at
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from paths(value, (*at, key))


@st.composite
def edited(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with a few values replaced, deleted, doubled, renamed, moved or wrapped."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from([*paths(tree)]))
        if not where:
            if draw(st.integers(0, 9)) == 0:
                return draw(VALUES)
            continue
        *above, last = where
        branch = tree
        for key in above:
            branch = branch[key]
        match draw(st.sampled_from(WAYS)):
            case "nudge":
                alike = ALIKE.get(type(branch[last]), (None,))
                branch[last] = copy.deepcopy(draw(st.sampled_from(alike)))
            case "replace":
                branch[last] = draw(VALUES)
            case "delete":
                del branch[last]
            case "double" if isinstance(branch, list):
                branch.insert(draw(st.integers(0, len(branch))), copy.deepcopy(branch[last]))
            case "rename" if isinstance(branch, dict):
                branch[draw(st.sampled_from(TEXTS))] = branch.pop(last)
            case "wrap":
                branch[last] = draw(st.sampled_from(([branch[last]], {"a": branch[last]})))
            case _:  # move
                other = draw(st.sampled_from([*paths(tree)]))
                value = tree
                for key in other:
                    value = value[key]
                branch[last] = copy.deepcopy(value)
    return tree


@st.composite
def cut_up(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes changed, left out, put in, doubled or cut off."""
    for _ in range(draw(st.integers(1, 4))):
        at, long = draw(st.integers(0, len(content))), draw(st.sampled_from((1, 1, 4, 8, 64, 1000)))
        near = draw(st.booleans())  # most of what can break stands at the beginning
        at = min(at, draw(st.integers(0, 200))) if near else at
        match draw(st.sampled_from(("change", "flip", "put in", "leave out", "double", "cut off"))):
            case "change":
                some = draw(st.binary(min_size=1, max_size=8))
                content = content[:at] + some + content[at + len(some) :]
            case "flip" if at < len(content):
                bit = 1 << draw(st.integers(0, 7))
                content = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
            case "put in":
                content = content[:at] + draw(st.binary(max_size=16)) + content[at:]
            case "leave out":
                content = content[:at] + content[at + long :]
            case "double":
                content = content[: at + long] + content[at:]
            case _:
                content = content[:at]
    return content


def as_json(tree: Any) -> bytes:
    text = json.dumps(tree, ensure_ascii=True)
    return text.encode()


def as_lines(tree: Any) -> bytes:
    lines = tree if isinstance(tree, list) else [tree]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def as_yaml(tree: Any) -> bytes:
    try:
        return yaml.safe_dump(tree, sort_keys=False).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return b""


def each_edit(tree: Any, values: tuple[Any, ...]) -> Iterator[Any]:
    """The tree with one value deleted or replaced, for every place in it."""
    for *above, last in (where for where in paths(tree) if where):
        for value in ("delete", *values):
            edit = copy.deepcopy(tree)
            branch = edit
            for key in above:
                branch = branch[key]
            if value == "delete":
                del branch[last]
            else:
                branch[last] = value
            yield edit


def text_inputs(tree: Any, dump: Callable[[Any], bytes], *more: bytes) -> Strategy:
    """For a file of text that holds a tree."""
    return st.one_of(
        edited(tree).map(dump),
        edited(tree).map(dump),
        edited(tree).map(dump),
        cut_up(dump(tree)),
        st.binary(max_size=100),
        st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.sampled_from(more or (b"", b"null", b"[]", b"{}", b"[" * 9999, b"\xff\xfe", b"NaN")),
        st.sampled_from(PLACES),
    )


def yaml_inputs(tree: Any) -> Strategy:
    return text_inputs(tree, as_yaml, *(text.encode() for text in YAML_TEXTS))


def plain(text: str) -> str:
    """Without what a file in UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


DOCUMENTS = ("images", "config", shards.OFFSETS)  # words of a safetensors file that are JSON


@st.composite
def tensors(draw: st.DrawFn, content: bytes) -> bytes:
    """A sound safetensors file with other tensors, and perhaps other words."""
    length = int.from_bytes(content[:8], "little")
    words = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    found = dict(sorted(read_safetensors(content).items()))  # it has them in any order
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*found] or [""]))
        tensor = found.pop(name, torch.zeros(1))
        match draw(st.sampled_from(("fill", "bytes", "cast", "shape", "drop", "rename", "grow"))):
            case "fill":
                value = draw(st.sampled_from((0.0, 1.0, -1.0, 255.0, 1e30, math.nan, math.inf)))
                found[name] = tensor.double().fill_(value).to(tensor.dtype)
            case "bytes":
                raw = bytearray(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
                for i in draw(st.lists(st.integers(0, max(len(raw) - 1, 0)), max_size=4)):
                    raw[i : i + 1] = draw(st.binary(min_size=1, max_size=1)) if raw else b""
                whole = torch.frombuffer(raw, dtype=tensor.dtype) if raw else tensor
                found[name] = whole.reshape(tensor.shape)
            case "cast":
                kinds = (torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8)
                found[name] = tensor.to(draw(st.sampled_from((*kinds, torch.complex64))))
            case "shape":
                flat = tensor.flatten()
                ways = (flat, tensor[None], tensor[..., None], tensor.sum(), flat[:0])
                found[name] = draw(st.sampled_from(ways))
            case "rename":
                found[draw(st.sampled_from((*found, f"{name}.x", "", "pgd-40.labels")))] = tensor
            case "grow":
                found[name] = torch.cat([tensor.flatten(), tensor.flatten()])
    tree = dict(words)
    if draw(st.booleans()) and (told := [key for key in DOCUMENTS if key in words]):
        key = draw(st.sampled_from(told))
        tree[key] = json.dumps(draw(edited(json.loads(words[key]))))
    elif draw(st.booleans()):
        other = draw(edited(tree))
        items = other.items() if isinstance(other, dict) else ()
        tree = {k: v for k, v in items if isinstance(v, str)}
    return save(found, {plain(k): plain(v) for k, v in tree.items()})


@st.composite
def safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """A safetensors file whose header, or its length, says something else."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.get("__metadata__", {}).pop(tensor_files.ENTRY, None)
    if draw(st.booleans()) and "config" in header.get("__metadata__", {}):
        tree = json.loads(header["__metadata__"]["config"])
        header["__metadata__"]["config"] = json.dumps(draw(edited(tree)))
    else:
        header = draw(edited(header))
    text = json.dumps(header).encode()
    sizes = (len(text), 0, 1, len(text) - 1, len(text) + 9, 10**10, 2**64 - 1, 10**8)
    said = draw(st.sampled_from((len(text), *sizes)))
    return said.to_bytes(8, "little") + text + body[: draw(st.sampled_from((None, 0, -1)))]


EMPTY = (2).to_bytes(8, "little") + b"{}"


def safetensors_inputs(content: bytes) -> Strategy:
    return st.one_of(
        tensors(content),
        tensors(content),
        tensors(content),
        safetensors(content),
        cut_up(content),
        st.binary(max_size=64),
        st.sampled_from((pickle.dumps({"a": 1}), b"PK\3\4", b"", b"\0" * 8, EMPTY)),
        st.sampled_from(PLACES),
    )


def unsealed(path: Path, **metadata: str) -> bytes:
    """A weights file without its checksum, so that what is changed in it is read."""
    tensors = tensor_files.load_weights(path)
    words = tensor_files.load_metadata(path) | metadata
    tensor_files.write_tensors(tensors, path, words)
    return path.read_bytes()


# Tensors that are not numbers one after the other in memory, of the same shape.
OTHER_KINDS: dict[str, Callable[[torch.Tensor], object]] = {
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "of a class": lambda t: torch.nn.Buffer(t),
    "numpy": lambda t: t.numpy(),
    "number": lambda _: 3,
    "words": lambda _: "w" * 5000,
    "nothing": lambda _: None,
    "itself": lambda t: {"state_dict": t},
}
ODD_NAMES = (1, 2.5, None, (1, 2), True, b"x", "", "module", "module.", ".", "\x1b[2J", "x" * 5000)


@st.composite
def foreign(draw: st.DrawFn, state: dict[str, torch.Tensor]) -> bytes:
    """What torch.save writes: other tensors, other names, in others' entries or in its own."""
    tree: dict[Any, Any] = dict(state)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*tree]))
        value = tree.pop(name)
        if draw(st.booleans()):
            tree[draw(st.sampled_from(ODD_NAMES))] = value
        elif borrowed._is_plain(value) and not value.is_complex():
            with warnings.catch_warnings(action="ignore"):  # some kinds are prototypes
                tree[name] = OTHER_KINDS[draw(st.sampled_from([*OTHER_KINDS]))](value)
    for entry in draw(st.lists(st.sampled_from(borrowed.KEYS), max_size=6)):
        tree = {"epoch": 3, entry: tree}
    if draw(st.integers(0, 3)) == 0:
        tree[draw(st.sampled_from(borrowed.KEYS))] = tree
    buffer = io.BytesIO()
    try:
        torch.save(tree, buffer, _use_new_zipfile_serialization=draw(st.integers(0, 3)) > 0)
    except Exception:  # what torch cannot save
        return b""
    return buffer.getvalue()


def archive_of(records: Mapping[str, bytes | int]) -> bytes:
    """An archive that ends as those of torch.save do; a number stands for so many MB of zeros."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in records.items():
            with archive.open(name, "w") as record:
                for part in [content] if isinstance(content, bytes) else [bytes(1 << 20)] * content:
                    record.write(part)
    body, end = buffer.getvalue()[:-22], buffer.getvalue()[-22:]
    many, (length, begin) = len(records), struct.unpack("<II", end[12:20])
    whole = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, many, many, length, begin)
    return body + whole + struct.pack("<4sIQI", b"PK\6\7", 0, len(body), 1) + end


def records_of(content: bytes) -> dict[str, bytes]:
    """What lies in an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_bombs(megabytes: int) -> list[bytes]:
    """Small archives that unpack to so much: a tensor, and the words that tell of it."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(1 << 18)}, buffer)  # a MB
    records: dict[str, bytes | int] = dict(records_of(buffer.getvalue()))
    said, tensor = (next(n for n in records if n.endswith(end)) for end in ("/data.pkl", "/0"))
    pickled, many = records[said], (megabytes << 18).to_bytes(4, "little")
    assert isinstance(pickled, bytes)
    large = pickled.replace((1 << 18).to_bytes(4, "little"), many)
    words = b"\x80\x02" + b"N0" * (megabytes << 19) + b"}."
    return [archive_of(records | {said: large, tensor: megabytes}), archive_of({said: words})]


def foreign_inputs(content: bytes, heavy: bool) -> Strategy:
    """For a file that torch.save wrote."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    records = records_of(content)
    name = next(name for name in records if name.endswith("data.pkl"))
    return st.one_of(
        foreign(state),
        foreign(state),
        foreign(state),
        cut_up(content),
        cut_up(records[name]).map(lambda said: archive_of(records | {name: said})),
        st.binary(max_size=64),
        st.sampled_from((b"", b"PK\3\4", b"PK\3\4" + bytes(200), *PICKLES)),
        st.sampled_from(archive_bombs(1000) if heavy else PLACES),
        st.sampled_from(PLACES),
    )


SHAPES = st.lists(st.sampled_from((0, 1, 2, 3, 4, 28, 10**6, 2**31, 2**40, -1)), max_size=5).map(
    tuple
)
TYPES = st.sampled_from(
    ("|u1", "<i8", "<f4", "<f8", "|b1", "|O", "<U3", ">i2", "<u8", "<c16", "|V4", "<M8[s]", "<f2")
)


@st.composite
def npz(draw: st.DrawFn, arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """An npz with other arrays, or arrays that are not what they say."""
    buffer = io.BytesIO()
    spoilt = draw(st.sets(st.sampled_from(KEYS), min_size=1, max_size=2))
    way = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)))
    with zipfile.ZipFile(buffer, "w", way) as archive:
        for key, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array)
            content = file.getvalue()
            if key in spoilt:
                match draw(st.sampled_from(("lies", "another", "label", "label", "cut", "like"))):
                    case "lies":
                        said = {"descr": draw(TYPES), "fortran_order": draw(st.booleans())}
                        said = draw(edited(said | {"shape": draw(SHAPES)}))
                        words = repr(said).encode("utf-8", "replace") + b"\n"
                        size = struct.pack("<H", len(words) % 65536)
                        content = b"\x93NUMPY\x01\0" + size + words + array.tobytes()
                    case "another":
                        shape = tuple(min(abs(n), 40) for n in draw(SHAPES))[:4]
                        kind = np.dtype(draw(st.sampled_from(("u1", "i8", "f4", "?", "U2"))))
                        file = io.BytesIO()
                        np.save(file, np.zeros(shape, kind))
                        content = file.getvalue()
                    case "label" if key.startswith("y"):
                        label = draw(st.sampled_from((-1, 10, 999, 1000, 10**9, 2**63, 2**64 - 1)))
                        file = io.BytesIO()
                        np.save(file, np.full(len(array), label, "i8" if label < 0 else "u8"))
                        content = file.getvalue()
                    case "like":
                        ways = (array[..., None], array[:, None], array.astype("u2"), array[::-1])
                        more = (array[:1], np.asfortranarray(array), array.astype(">i8"), array[0])
                        file = io.BytesIO()
                        np.save(file, draw(st.sampled_from((*ways, *more))))
                        content = file.getvalue()
                    case "cut":
                        content = content[: draw(st.integers(0, len(content)))]
                    case _:
                        content = draw(cut_up(content))
            archive.writestr(f"{key}.npy", content)
    return buffer.getvalue()


def bomb() -> bytes:
    """An npz of 200 kB whose images would fill 200 MB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for key in KEYS:
            file = io.BytesIO()
            many = 250_000 if key == "x_train" else 4
            shape = (many, 28, 28) if key[0] == "x" else (many,)
            np.save(file, np.zeros(shape, np.uint8))
            archive.writestr(f"{key}.npy", file.getvalue())
    return buffer.getvalue()


@st.composite
def idx(draw: st.DrawFn, values: bytes, zipped: bool) -> bytes:
    """An IDX file of some shape."""
    number = st.sampled_from((0, 1, 2, 4, 28, 2**16, 2**31, 2**32 - 1))
    shape = draw(st.lists(number, max_size=6))
    said = draw(st.sampled_from((len(shape), len(shape), 0, 3, 255)))
    content = bytes([0, 0, draw(st.sampled_from((8, 8, 9, 0x0D))), said])
    content += struct.pack(f">{len(shape)}I", *shape) + values
    return gzip.compress(content, 1) if zipped else content


def picture_files() -> list[bytes]:
    """A small picture in each format and mode that we read."""
    found = []
    noise = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    rgb = Image.fromarray(noise)
    wide = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    for kind in ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP"):
        for image in (rgb, rgb.convert("L"), rgb.convert("P"), rgb.convert("1"), wide):
            buffer = io.BytesIO()
            try:
                image.save(buffer, kind)
            except (OSError, ValueError):  # a format has not every mode
                continue
            found.append(buffer.getvalue())
    for kind in ("GIF", "PNG", "WEBP"):
        buffer = io.BytesIO()
        rgb.save(buffer, kind, save_all=True, append_images=[rgb.rotate(180)] * 3)
        found.append(buffer.getvalue())
    return found


def png(width: int, height: int, bits: int, kind: int, rows: bytes = b"") -> bytes:
    """A PNG of these words about itself, with all checksums right."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + data + chunk(b"IEND", b"")


SIDES = st.sampled_from((0, 1, 2, 5, 100, 5000, 5001, 13_000, 20_000, 2**24, 2**31 - 1, 2**32 - 1))
PNGS = st.builds(
    png,
    SIDES,
    SIDES,
    st.sampled_from((1, 2, 4, 8, 16, 3)),
    st.sampled_from((0, 2, 3, 4, 6, 1)),
    st.sampled_from((b"", b"\0" * 7, b"\0" * 100_000)),
)


def large() -> list[bytes]:
    """Pictures of about as many pixels as we read, of one colour: a few kB each."""
    bytes_of = {(8, 2): 3, (8, 6): 4, (16, 0): 2, (8, 3): 1}
    side = math.isqrt(PIXELS)
    return [
        png(side, side, bits, kind, (b"\0" * (many * side + 1)) * side)
        for (bits, kind), many in bytes_of.items()
    ]


OTHERS = (  # what pillow would read under any name
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) (w) file\n",
    b"P6\n99999 99999\n255\n",
    b"P5 0 0 255\n",
    b"P4\n4 4\n",
    b"#define x_width 9\n#define x_height 9\n",
    b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\2L\1\0;",
    b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 2**31 - 1, -(2**31), 1, 24, *[0] * 6),
)


# ---------------------------------------------------------------- what reads it


class Hang(BaseException):
    """It took too long."""


class NoSentence(Exception):  # noqa: N818
    """It ended otherwise than the command line may."""


def command(*words: object, fine: str = "") -> None:
    """Run `yopo` in this process; a ValueError is what a user would read."""
    said, wrong = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["yopo", *map(str, words)]),
        redirect_stdout(said),
        redirect_stderr(wrong),
    ):
        try:
            cli.main()
        except SystemExit as end:
            text = wrong.getvalue()
            if end.code != 2 or not text.startswith("yopo: ") or "Traceback" in text:
                raise NoSentence(f"exit {end.code}: {text}") from None
            if len(text) > 4000 or re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
                raise NoSentence(f"no message for people: {text[:200]!r}") from None
            if not (fine and fine in text):
                raise ValueError(text) from None


def ours(call: Callable[[], object]) -> None:
    """Call a function as the command line does."""
    try:
        call()
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if not isinstance(error, OSError) and not cli._is_ours(error):
            raise NoSentence(repr(error)) from error
        raise ValueError(str(error)) from error


def memory(word: str) -> int:
    """VmRSS (now) or VmHWM (the most since it was reset) in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = re.search(rf"{word}:\s+(\d+) kB", status.read_text())
    assert found
    return int(found[1]) * 1024


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Hang after so long: of this process's own time, or twelve times that of waiting.

    A busy machine gives it little time, and is no failure.
    """

    def ring(_number: int, _frame: object) -> None:
        raise Hang(f"over {seconds} s")

    clocks = {
        signal.ITIMER_PROF: (signal.SIGPROF, seconds),
        signal.ITIMER_REAL: (signal.SIGALRM, 12 * seconds),
    }
    before = {number: signal.signal(number, ring) for number, _ in clocks.values()}
    for clock, (_, most) in clocks.items():
        signal.setitimer(clock, most)
    try:
        yield
    finally:
        for clock, (number, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    """Let no more than so many bytes be asked for in this process; a trap fails at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def put(path: Path, damage: Damage) -> None:
    """Damage a file, or put something else in its place."""
    clear(path)
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "loop":
        path.symlink_to(path.name)
    elif damage == "device":
        path.symlink_to("/dev/zero")
    elif damage == "endless":
        with path.open("wb") as file:
            file.truncate(1 << 40)


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Seen:
    """What a reader made of an input."""

    refused: str | None  # what it said
    seconds: float
    growth: int  # bytes


def attempt(reader: Reader, damage: Damage) -> Seen:
    """Let a reader meet a damaged file; what is no sentence is raised."""
    put(reader.path, damage)
    reader.after()
    refused = None
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, started = memory("VmRSS"), time.perf_counter()
    try:
        with warnings.catch_warnings(action="ignore"), within(SECONDS):
            reader.read()
    except ValueError as error:
        refused = str(error)
    finally:
        seconds, growth = time.perf_counter() - started, memory("VmHWM") - before
        put(reader.path, reader.whole)
    if growth > GROWTH:
        raise NoSentence(f"memory grew by {growth:,} bytes")
    return Seen(refused, seconds, growth)


# ---------------------------------------------------------------- all of them


def readers(room: Path, *, heavy: bool = False) -> dict[str, Reader]:
    """Every reader with a sound file to damage; `heavy`: also large files, which take seconds."""
    found = _reports(room / "report") | _runs(room / "run")
    return found | _foreign(room / "foreign", heavy) | _data(room / "data", heavy)


def _loads(path: Path) -> Any:
    return json.loads(path.read_text())


def _reports(room: Path) -> dict[str, Reader]:
    run = write_full_run(room / "pgd-40-seed-0")
    other = write_full_run(room / "other")
    page, turn = room / "page.html", [0]
    bench = room / "bench.json"
    rows = [{"method": "pgd-40", "literal": 5.0}, {"method": "yopo-5-10", "literal": 2.5}]
    tree = {"model": "smallcnn", "rows": rows, "device": "a GPU", "batch": 128}
    bench.write_text(json.dumps(tree))
    recipe = room / "recipe.yaml"
    shutil.copy(run / "config.yaml", recipe)
    show = ("reproduce", "table1", "--out", room, "--show")

    def look() -> None:
        turn[0] += 1
        if turn[0] % 4 == 0:
            command(*show)
        elif turn[0] % 4 == 1:
            command("report", run, other, "--out", page, "--paper", "table1")
        else:
            command("report", run, "--out", page)

    listed = room / "listed"
    for name in ("going", "done"):
        shutil.copytree(run, listed / name)
    (listed / "going/result.json").unlink()
    result = _loads(run / "result.json")
    config = yaml.safe_load(recipe.read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    examples = unsealed(run / "eval-examples.safetensors")
    return {
        "recipe": Reader(
            recipe,
            yaml_inputs(config),
            lambda: command("train", recipe, fine="expected a folder for the run"),
        ),
        "config, report": Reader(run / "config.yaml", yaml_inputs(config), look),
        "metrics": Reader(run / "metrics.jsonl", text_inputs(lines, as_lines), look),
        "result": Reader(run / "result.json", text_inputs(result, as_json), look),
        "metrics, ls": Reader(
            listed / "going/metrics.jsonl",
            text_inputs(lines, as_lines),
            lambda: command("ls", listed),
        ),
        "result, ls": Reader(
            listed / "done/result.json",
            text_inputs(result, as_json),
            lambda: command("ls", listed / "done"),
        ),
        "eval": Reader(run / "eval.json", text_inputs(_loads(run / "eval.json"), as_json), look),
        "examples": Reader(
            run / "eval-examples.safetensors",
            safetensors_inputs(examples),
            lambda: command("report", run, "--out", page),
        ),
        "bench": Reader(
            bench, text_inputs(tree, as_json), lambda: command(*show, "--bench", bench)
        ),
    }


def _runs(room: Path) -> dict[str, Reader]:
    room.mkdir()
    data, run, weights = room / "tiny.npz", room / "run", room / "net.safetensors"
    arrays = tiny_data()
    np.savez(data, **{key: getattr(arrays, key).numpy() for key in KEYS})
    over: Tree = {"data": {"name": "npz", "path": str(data)}, "epochs": 1}
    torch.set_default_dtype(torch.float32)
    tiny_trainer(run, over).run()
    shutil.copy(run / "model.safetensors", weights)
    config = yaml.safe_load((run / "config.yaml").read_text())
    shutil.copy(run / "result.json", room / "result.json")
    unsealed(weights)
    few = ("--attacks", "clean", "--samples", "3", "--device", "cpu")

    def finished() -> None:
        (room / "compare/yopo-2-2").mkdir(parents=True, exist_ok=True)
        own = room / "compare/yopo-2-2"
        flags = [
            f"--{k}={v}" for k, v in (("epochs", 1), ("data.name", "npz"), ("data.path", data))
        ]
        tree = method_configs("demo", ["yopo-2-2"], settings_typed(flags))["yopo-2-2"]
        (own / "config.yaml").write_text(yaml.safe_dump(tree.tree()))
        command(
            *("compare", "demo", "--methods", "yopo-2-2", "--out", room / "compare", "--resume"),
            *flags,
        )

    result = room / "compare/yopo-2-2/result.json"
    result.parent.mkdir(parents=True)
    shutil.copy(room / "result.json", result)
    newest, *older = state.saved(run / "state")
    for folder in older:
        shutil.rmtree(folder)
    trainer = tiny_trainer(run, over)

    def resume() -> None:
        trainer.files.watch = Silent()
        ours(trainer.resume)

    net = trainer.learner.follower
    x, y = arrays.x_test[:6], arrays.y_test[:6]
    journal = room / "journal"

    def evaluate() -> None:
        ours(
            lambda: yopo.evaluate(
                *(net, (x, y), yopo.Linf(0.1), "pgd-1"),
                batch=3,
                state=journal,
                examples=True,
                checks=False,
            )
        )

    picture, told, turn = room / "picture.png", room / "told.safetensors", [0]
    Image.new("L", (16, 16), 99).save(picture)
    shutil.copy(weights, told)

    def answer() -> None:
        turn[0] += 1
        if turn[0] % 2:
            command("predict", told, picture)
            return
        # All but the export itself, which is slow and reads nothing more.
        packed = mock.patch.object(exporting, "_packed", return_value=b"")
        with packed, mock.patch.object(exporting, "_judge", return_value=None):
            command("export", told, "--to", "pt2", "--out", room / "x.pt2", "--overwrite")

    spread = _in_shards(newest, room / "spread")
    other = tiny_trainer(spread.parents[1], over)

    def resume_spread() -> None:
        other.files.watch = Silent()
        ours(other.resume)

    evaluate()
    piece = next(journal.rglob("pgd-1*.safetensors"))
    answers = next(journal.rglob("network.safetensors"))
    return {
        "weights, predict": Reader(told, safetensors_inputs(told.read_bytes()), answer),
        "shard": Reader(
            spread / "shard-00000.safetensors",
            safetensors_inputs((spread / "shard-00000.safetensors").read_bytes()),
            resume_spread,
            lambda: _reseal(spread),
        ),
        "config, eval": Reader(
            run / "config.yaml", yaml_inputs(config), lambda: command("eval", run, *few)
        ),
        "weights": Reader(
            weights,
            safetensors_inputs(weights.read_bytes()),
            lambda: command("eval", weights, *few),
        ),
        "eval before": Reader(
            _evaluated(run, few),
            text_inputs(_loads(run / "eval.json"), as_json),
            lambda: command("eval", run, *few),
        ),
        "result, compare": Reader(
            result,
            text_inputs(_without(result), as_json).filter(lambda d: d not in GONE),
            finished,
        ),
        "seal": Reader(
            newest / "seal.json", text_inputs(_loads(newest / "seal.json"), as_json), resume
        ),
        "values": Reader(
            newest / "values.json",
            text_inputs(_loads(newest / "values.json"), as_json),
            resume,
            lambda: _reseal(newest),
        ),
        "state": Reader(
            newest / "tensors.safetensors",
            safetensors_inputs((newest / "tensors.safetensors").read_bytes()),
            resume,
            lambda: _reseal(newest),
        ),
        "journal": Reader(piece, safetensors_inputs(piece.read_bytes()), evaluate),
        "journal's network": Reader(answers, safetensors_inputs(answers.read_bytes()), evaluate),
    }


def _foreign(room: Path, heavy: bool) -> dict[str, Reader]:
    """Weights that no run of ours made."""
    room.mkdir(parents=True)
    file = room / "net.pt"
    torch.save(dict(SmallCNN(width=2, hidden=4).state_dict()), file)
    network = ("--model.name", "smallcnn", "--model.options.width=2", "--model.options.hidden=4")
    few = ("--attacks", "clean", "--samples", "3", "--device", "cpu")
    return {
        "weights, foreign": Reader(
            file,
            foreign_inputs(file.read_bytes(), heavy),
            lambda: command("eval", *network, "--weights", file, *few),
        )
    }


def _reseal(checkpoint: Path) -> None:
    """So that what is inside is looked at, and not the checksum alone."""
    sums = {}
    for file in sorted(checkpoint.iterdir()):
        if file.name != "seal.json" and file.is_file() and file.stat().st_size < 1 << 30:
            sums[file.name] = files.file_digest(file)
    (checkpoint / "seal.json").write_text(json.dumps(sums))


def _in_shards(checkpoint: Path, run: Path) -> Path:
    """The same checkpoint as two processes would have written it, each a half of each tensor."""
    there = run / "state" / checkpoint.name
    there.mkdir(parents=True)
    shutil.copy(checkpoint / "values.json", there)
    parts = [dict[str, torch.Tensor](), dict[str, torch.Tensor]()]
    offsets: list[dict[str, Any]] = [{}, {}]
    for name, tensor in tensor_files.load_tensors(checkpoint / "tensors.safetensors").items():
        whole = tensor.dim() == 0 or len(tensor) < 2
        for rank, half in enumerate([tensor] if whole else tensor.tensor_split(2)):
            parts[rank][f"tensors/{name}"] = half
            at = [rank * (len(tensor) - len(half)), *[0] * (tensor.dim() - 1)] if not whole else []
            offsets[rank][f"tensors/{name}"] = {"saved_offsets": at or [0] * tensor.dim()}
    for rank, mine in enumerate(parts):
        file = there / shards.NAMED.replace("*", f"{rank:05d}")
        tensor_files.write_tensors(mine, file, {shards.OFFSETS: json.dumps(offsets[rank])})
    _reseal(there)
    return there


def _evaluated(run: Path, few: tuple[str, ...]) -> Path:
    command("eval", run, *few)
    return run / "eval.json"


def _without(path: Path) -> Any:
    """A tree without its checksum."""
    tree = _loads(path)
    tree.pop("sha256", None)
    return tree


def _data(room: Path, heavy: bool) -> dict[str, Reader]:
    room.mkdir()
    rng = np.random.default_rng(0)
    sound = {
        "x_train": rng.integers(0, 256, (6, 28, 28), np.uint8),
        "y_train": np.arange(6, dtype=np.uint8),
        "x_test": rng.integers(0, 256, (4, 28, 28), np.uint8),
        "y_test": np.arange(4, dtype=np.uint8),
    }
    own = room / "own.npz"
    np.savez(own, **sound)  # type: ignore[arg-type]
    mnist, plain = room / "mnist", room / "mnist-gz"
    for folder, zipped in ((mnist, False), (plain, True)):
        folder.mkdir()
        for name, key in zip(IDX_FILES, KEYS, strict=True):
            array = sound[key]
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content += array.tobytes()
            file = folder / (f"{name}.gz" if zipped else name)
            file.write_bytes(gzip.compress(content) if zipped else content)
    batches = room / "cifar/cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in CIFAR_BATCHES:
        batch = {
            b"data": np.zeros((2, 3072), np.uint8),
            b"labels": [0, 1],
            b"names": [b"a"] * 2,
        }
        (batches / name).write_bytes(pickle.dumps(batch, 2))
    pictures, folder = picture_files(), room / "folder"
    for split in ("train", "test"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            (folder / split / name / "1.png").write_bytes(pictures[0])
    size = [0]

    def look() -> None:
        size[0] += 1
        ours(lambda: load("folder", root=folder, size=(None, 4, 8, 300)[size[0] % 4]))

    label, images = mnist / IDX_FILES[1], plain / f"{IDX_FILES[0]}.gz"
    return {
        "npz": Reader(
            own,
            st.one_of(
                npz(sound),
                npz(sound),
                npz(sound),
                cut_up(own.read_bytes()),
                st.binary(max_size=64),
                st.sampled_from((b"", b"PK\5\6" + b"\0" * 18, *([bomb()] if heavy else []))),
                st.sampled_from(PLACES),
            ),
            lambda: ours(lambda: load("npz", path=own)),
        ),
        "idx": Reader(
            label,
            st.one_of(
                idx(label.read_bytes()[8:], False),
                cut_up(label.read_bytes()),
                st.binary(max_size=64),
                st.sampled_from(PLACES),
            ),
            lambda: ours(lambda: load("mnist", root=mnist)),
        ),
        "idx, gzip": Reader(
            images,
            st.one_of(
                idx(sound["x_train"].tobytes(), True),
                cut_up(images.read_bytes()),
                st.binary(max_size=64),
                st.sampled_from((b"", *([gzip.compress(b"\0" * (100 << 20), 1)] if heavy else []))),
                st.sampled_from(PLACES),
            ),
            lambda: ours(lambda: load("mnist", root=plain)),
        ),
        "cifar batch": Reader(
            batches / "data_batch_3",
            st.one_of(
                cut_up((batches / "data_batch_3").read_bytes()),
                cut_up((batches / "data_batch_3").read_bytes()),
                st.binary(max_size=64),
                st.sampled_from(PICKLES),
                st.sampled_from(PLACES),
            ),
            lambda: ours(lambda: load("cifar10", root=room / "cifar")),
        ),
        "picture": Reader(
            folder / "train/b/1.png",
            st.one_of(
                st.sampled_from(pictures).flatmap(cut_up),
                st.sampled_from(pictures).flatmap(cut_up),
                st.sampled_from(pictures),
                PNGS,
                st.sampled_from((*OTHERS, *(large() if heavy else []))),
                st.binary(max_size=64),
                st.sampled_from(PLACES),
            ),
            look,
        ),
    }


PICKLES = (
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x80\x02Nr\0\0\0\x08.",  # a memo of 2²⁷ places
    b"\x80\x02" + b"(" * 100_000 + b".",
    b"\x80\x02]q\0" + b"h\0a" * 50_000 + b".",
    b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",  # bytes of 2⁶³
    b"I" + b"9" * 10_000 + b"\n.",
    b"cnumpy\nndarray\n((L99999999999L\ntR.",
    b"c_codecs\nencode\n(S'" + b"a" * 5000 + b"'\nS'idna'\ntR.",
    base64.b64decode("gAJjbnVtcHkKZHR5cGUKKFgCAAAAVTFLAEsBdFIu"),
    pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": "ab"}, 2),
    pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}, 2),
    pickle.dumps({"data": np.zeros((2, 3000), np.uint8), "labels": [0, 10**30]}, 2),
    pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, -1]}, 5),
)
