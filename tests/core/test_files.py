"""Files from outside: one way to read them, and what is wrong is said in a sentence."""

import ast
import io
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import yopo
from tests.conftest import Disk
from tests.fuzzing import GROWTH, bomb, large, little_memory, memory, png, within
from yopo.core import files, tensor_files
from yopo.data import load
from yopo.data.formats import PIXELS, _kept, read_picture
from yopo.report.records import read_runs
from yopo.runs.sections import read_number

ROOT, PACKAGE = Path(__file__).parents[2], Path(yopo.__file__).parent

# ---------------------------------------------------------------- one way

# What reads a file, or makes values of what was read, and who may.
READERS = {
    "loads": {
        "core/files.py",
        "paper/tables.py",
        "core/seals.py",
    },  # of the package itself; of what was just dumped
    "load_file": {"core/tensor_files.py"},
    "safe_open": {"core/tensor_files.py"},
    "safe_load": set(),
    "read_text": {"core/files.py", "paper/tables.py", "report/page.py"},
    "read_bytes": {"core/files.py"},
    "fromfile": set(),
    "genfromtxt": set(),
    "loadtxt": set(),
    "memmap": set(),
    "Unpickler": {"data/formats.py"},
    "_Unpickler": {"data/formats.py"},
    "ZipFile": {"core/tensor_files.py", "data/formats.py"},
    "GzipFile": {"data/formats.py"},
    "literal_eval": set(),
}
MODULES = {  # where `load` and `open` mean a file
    "np.load": {"data/sources.py"},  # the embedded digits
    "torch.load": {"core/tensor_files.py"},  # tensors alone, of a file that the user names
    "pickle.load": set(),
    "json.load": set(),
    "yaml.load": {"core/files.py"},
    "yaml.parse": {"core/files.py"},
    "gzip.open": set(),
    "Image.open": {"data/formats.py"},
    "tarfile.open": {"data/archives.py"},
    # A folder, to lock it; a secret, to make it.
    "os.open": {"core/files.py", "runs/alone.py", "core/seals.py"},
    "io.open": set(),
}
OPEN = {"core/files.py", "data/formats.py", "data/sources.py"}  # of a zip; the embedded digits
OURS = {"files", "seals", "folder", "self"}  # modules of ours whose functions have such names


def others(text: str, file: str) -> list[str]:
    """Ways of reading that a module of the package may not have."""
    tree, found = ast.parse(text), []
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("yopo")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        whole = ast.unparse(node.func)
        on, _, name = whole.rpartition(".")
        ours = on in OURS or whole in imported
        bad = name in READERS and file not in READERS[name] and not ours
        if name == "open" and not _writes(node):
            bad |= file not in MODULES.get(whole, OPEN)
        elif whole in MODULES:
            bad |= file not in MODULES[whole]
        found += [whole] if bad else []
    return found


def _writes(call: ast.Call) -> bool:
    """Whether a call of `open` says that it writes."""
    modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
    return any(isinstance(mode, str) and mode[:1] in tuple("wax") for mode in modes)


def test_nothing_else_reads_files() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 50
    for file in modules:
        name = file.relative_to(PACKAGE).as_posix()
        assert not others(file.read_text(), name), name


@pytest.mark.parametrize(
    "line",
    [
        "json.loads(x)",
        "Path(x).read_text()",
        "path.read_bytes()",
        "yaml.safe_load(x)",
        "np.load(x)",
        "torch.load(x)",
        "Image.open(x)",
        "from safetensors.torch import load_file\nload_file(x)",
        "with safe_open(x) as f: pass",
        "with open(x) as f: pass",
        "path.open()",
        "path.open('rb')",
        "pickle.loads(x)",
    ],
)
def test_another_way_would_be_seen(line: str) -> None:
    assert others(line, "report/page2.py")
    assert not others(
        "from yopo.core.files import read_text\nread_text(x)\nfiles.read_bytes(y)", "x.py"
    )


# What writes a file that may be there already, through a link too, and who may.
WRITERS = {
    "write_text": {"core/files.py", "runs/state.py", "cli/bench.py"},  # new folders; a user's file
    "write_bytes": {"runs/exporting.py"},  # into what `files.whole` gives, as those below
    "savefig": {"report/curves.py", "cli/diagnose.py", "cli/bench.py"},
    "save_file": {"core/tensor_files.py"},
    "torch.save": {"runs/robustbench.py"},
    "open": {
        "cli/__init__.py",  # what takes all and keeps nothing
        "runs/folder.py",
        "data/fetch.py",
        "data/archives.py",
    },  # metrics, no link; fetched data
}
WHOLE = ("runs/exporting.py", "report/curves.py", "runs/robustbench.py", "core/tensor_files.py")


def test_nothing_else_writes_files() -> None:
    """All that is written replaces what has its name: `files.whole` is the one way."""
    there: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name, text = file.relative_to(PACKAGE).as_posix(), file.read_text()
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            whole = ast.unparse(call.func)
            last = whole.rpartition(".")[2]
            way = whole if whole in WRITERS else last
            ours = whole.partition(".")[0] in OURS or (last == "open" and not _writes(call))
            if way in WRITERS and not ours and f"import {way}" not in text:
                there.setdefault(way, set()).add(name)
    assert there == WRITERS
    for name in WHOLE:
        assert "whole(" in (PACKAGE / name).read_text()


# ---------------------------------------------------------------- text


def refused(call: Callable[[], object], *words: str) -> None:
    """At once, with little memory, in a sentence of ours that has these words."""
    with pytest.raises((ValueError, OSError)) as caught, within(5), little_memory(GROWTH):
        call()
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


YAML: dict[str, str | None] = {
    "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]": "alias",
    "a: !!python/object/apply:os.system [id]": "tag",
    "a: !!set {b}": "tag",
    "a: !!binary aGk=": "tag",
    "a: 2020-01-01": "got a date; quote it",
    "a: 2020-13-01": "month",
    "1: 2": "expected words for names, got 1",
    "~: 2": "expected words for names, got None",
    "a: 1\na: 2": "'a' twice",
    "a: {b: 1, b: 2}": "'b' twice",
    "a: .nan": "it has nan",
    "a: -.inf": "it has -inf",
    "a: 1.0e+999": "it has inf",
    f"a: {10**30}": "64 bits",
    f"a: {'9' * 5000}": "digits",
    "[" * 5000: "more than 32 brackets",
    "- " * 5000: "more than 32 brackets",
    'a: "\\0"': r"character '\x00'",
    'a: "\\x1b[2J"': r"character '\x1b'",
    "a: [1": "YAML",
    "a: " + "x" * (1 << 17): "bytes",
    "a: |\n " + "x" * 65_000: None,
    "---\na\n---\nb": "YAML",
}


@pytest.mark.parametrize(("text", "word"), YAML.items(), ids=lambda v: str(v)[:20])
def test_yaml(tmp_path: Path, text: str, word: str | None) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    if word is None:
        assert files.read_yaml(file)
    else:
        refused(lambda: files.read_yaml(file), str(file), word)


JSON = {
    b"": "Expecting value",
    b"{": "JSON",
    b"[" * 100_000: "JSON",
    b"[" * 40 + b"]" * 40: "more than 32 brackets",
    b"[" + b"[]," * 1_000_001 + b"[]]": "more than 1,000,000 brackets",
    b"1e999": "it has inf",
    b"9" * 30: "64 bits",
    b"9" * 5000: "digits",
    b'"\\ud800"': "character",
    b'"\\u0000"': "character",
    b'{"\\u001b": 1}': "character",
    b"\xff\xfe": "UTF-8",
    b'"' + b"x" * 70_000 + b'"': "letters",
    b" " * (17 << 20): "bytes",
}


@pytest.mark.parametrize(("text", "word"), JSON.items(), ids=lambda v: str(v)[:20])
def test_json(tmp_path: Path, text: bytes, word: str) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(text)
    refused(lambda: files.read_json(file), str(file), word)


Plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cc", "Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", min_size=1), inner),
)


@given(Plain)
def test_what_is_plain_comes_back_as_it_was(value: Any) -> None:
    import json

    import yaml

    assert files.parse_json(json.dumps(value), "x") == value
    assert files.parse_yaml(yaml.safe_dump(value, allow_unicode=True), "x") == value


def test_nan_becomes_none_unless_wanted() -> None:
    assert files.parse_json("[NaN, Infinity]", "x") == [None, None]
    found = files.parse_json("[NaN, -Infinity]", "x", nan=True)
    assert np.isnan(found[0])
    assert found[1] == -np.inf


@pytest.mark.parametrize(
    "text", ["1e999999999/3", "1/1e999999999", "1e400", "9" * 9999, "1/0", "x"]
)
def test_fractions_that_take_hours_are_refused(text: str) -> None:
    refused(lambda: read_number(text, "eps"), "expected a number for eps")


# ---------------------------------------------------------------- what is no plain file


def in_place(path: Path, what: str) -> None:
    match what:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)


@pytest.mark.parametrize("what", ["pipe", "folder", "device", "loop"])
@pytest.mark.parametrize(
    "read",
    [
        files.read_json,
        files.read_yaml,
        files.read_bytes,
        tensor_files.load_weights,
        tensor_files.load_metadata,
        lambda path: read_picture(path, None),
        lambda path: load("npz", path=path),
    ],
)
def test_what_is_no_plain_file_is_named_and_not_waited_for(
    tmp_path: Path, what: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "x.png"
    in_place(path, what)
    refused(lambda: read(path), "x.png")


# ---------------------------------------------------------------- data


def write_npz(path: Path, **other: np.ndarray[Any, Any] | bytes) -> Path:
    x, y = np.zeros((4, 8, 8), np.uint8), np.arange(4)
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y} | other
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in arrays.items():
            file = io.BytesIO()
            if isinstance(array, np.ndarray):
                np.save(file, array)
            archive.writestr(f"{key}.npy", array if isinstance(array, bytes) else file.getvalue())
    return path


def header(shape: str, kind: str = "'|u1'") -> bytes:
    words = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\0" + len(words).to_bytes(2, "little") + words + b"\0" * 64


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a label of 10⁹": ({"y_train": np.full(4, 10**9)}, "no more classes than images"),
    "a label of 2⁶³": ({"y_test": np.full(4, 2**63, np.uint64)}, "labels from 0 up in y_test"),
    "a huge shape": ({"x_train": header("(1000000, 1000000)")}, "too small for its shape"),
    "more than 64 bits": ({"x_train": header("(9999999999, 9999999999)")}, "too small"),
    "a negative shape": ({"x_train": header("(-4, 8, 8)")}, "cannot use"),
    "objects": ({"x_train": header("(4,)", "'|O'")}, "cannot use"),
    "no header": ({"x_train": b"\x93NUMPY\x01\0\xff\xff{"}, "cannot use"),
    "code for a header": ({"x_train": header("__import__('os')")}, "cannot use"),
}


@pytest.mark.parametrize(("arrays", "word"), BAD.values(), ids=BAD.keys())
def test_npz(tmp_path: Path, arrays: dict[str, Any], word: str) -> None:
    path = write_npz(tmp_path / "own.npz", **arrays)
    refused(lambda: load("npz", path=path), str(path), word)


def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(bomb())
    assert path.stat().st_size < 1 << 20
    refused(lambda: load("npz", path=path), str(path), "would unpack to")


def test_as_many_classes_as_images_or_a_thousand(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz", y_train=np.array([0, 1, 2, 999]))
    assert len(load("npz", path=path).names) == 1000
    many = {f"x_{s}": np.zeros((1500, 1, 1), np.uint8) for s in ("train", "test")}
    path = write_npz(path, **many, y_train=np.arange(1500), y_test=np.arange(1500, 3000))
    assert len(load("npz", path=path).names) == 3000


def folder(root: Path) -> Path:
    for split in ("train", "test"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (6, 5), (9, 9, 9)).save(root / split / name / "1.png")
    return root / "train/b/2.png"


PICTURES = {
    "over pillow's limit": (png(20_000, 20_000, 8, 2), "more pixels than any picture"),
    "where pillow warns": (png(10_000, 10_000, 8, 2), "10000x10000 pixels"),
    "over ours": (png(1, PIXELS + 1, 8, 0), "pixels"),
    "of nothing": (b"P5 0 0 255\n", "PNG, JPEG"),
    "a program for Ghostscript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "none of PNG, JPEG",
    ),
    "cut off": (png(100, 100, 8, 0, bytes(range(256)) * 40)[:200], "truncated"),
}


@pytest.mark.parametrize(("content", "word"), PICTURES.values(), ids=PICTURES.keys())
def test_pictures(tmp_path: Path, content: bytes, word: str) -> None:
    file = folder(tmp_path)
    file.write_bytes(content)
    refused(lambda: load("folder", root=tmp_path), str(file), word, "repair or remove it")


def test_a_thin_picture_is_not_blown_up(tmp_path: Path) -> None:
    file = folder(tmp_path)
    file.write_bytes(png(1, 1_000_000, 8, 0, b"\0\0" * 1_000_000))
    refused(lambda: load("folder", root=tmp_path, size=32), str(file), "cut it first")


def test_large_pictures_are_read_one_by_one_in_little_memory(tmp_path: Path) -> None:
    file = folder(tmp_path)
    for content in large()[:2]:
        file.write_bytes(content)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        assert read_picture(file, 8).shape == (8, 8, 3)
        assert memory("VmHWM") - before < GROWTH


JPEGS: dict[str, tuple[dict[str, object], str]] = {
    "as phones write them": ({}, ""),
    "without loss of colour": ({"subsampling": 0}, ""),
    "in several passes": ({"progressive": True}, ""),
    "too much to keep": ({"progressive": True, "subsampling": 0}, "save it smaller"),
}


@pytest.mark.parametrize(("how", "wrong"), JPEGS.values(), ids=JPEGS.keys())
def test_photographs_of_100_megapixels_are_read_in_little_memory(
    tmp_path: Path, how: dict[str, object], wrong: str
) -> None:
    """A grey one below a red quarter; decoded in full it would take 400 MB, and as much again."""
    file, (width, height) = tmp_path / "large.jpg", (12_032, 9_024)
    image = Image.new("RGB", (width, height), (128, 128, 128))
    image.paste((250, 10, 10), (0, 0, width // 2, height // 2))
    image.save(file, **how)  # type: ignore[arg-type]
    del image
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    if wrong:
        refused(lambda: read_picture(file, 16), wrong)
    else:
        with within(5):
            found = read_picture(file, 16)
        assert found.shape == (16, 16, 3)
        assert abs(found[2, 2].astype(int) - (250, 10, 10)).max() < 8
        assert abs(found[12, 12].astype(int) - 128).max() < 8
    assert memory("VmHWM") - before < GROWTH
    refused(lambda: read_picture(file, None), wrong or "give --data.size 64")
    refused(lambda: read_picture(file, 6_000), wrong or "where a side of 6,000 is wanted")


@pytest.mark.parametrize(("width", "height"), [(16_320, 12_240), (65_000, 65_000), (65_000, 2_000)])
def test_a_jpeg_of_more_pixels_than_are_read_is_refused_in_our_words(
    width: int, height: int, tmp_path: Path
) -> None:
    """Whether pillow would open it or not."""
    file = tmp_path / "x.jpg"
    Image.new("RGB", (64, 48)).save(file)
    content = file.read_bytes()
    sides = content.index(b"\xff\xc0") + 5
    told = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    file.write_bytes(content[:sides] + told + content[sides + 4 :])
    for size, least in ((64, 0), (None, 64), (None, 0)):
        with pytest.raises(ValueError, match=f"{PIXELS:,}.*; save it smaller") as caught:
            read_picture(file, size, least=least)
        assert not re.search("limit|attack|bomb", str(caught.value))


def test_a_jpeg_in_one_scan_is_told_from_one_in_several(tmp_path: Path) -> None:
    """Whatever it claims: what the decoder keeps of several is counted, 2 bytes a coefficient."""
    file = tmp_path / "x.jpg"
    Image.new("RGB", (64, 48)).save(file, subsampling=0)
    content = file.read_bytes()
    scan = content.index(b"\xff\xda")
    one = b"\xff\xda\0\x08\x01" + content[scan + 5 : scan + 7] + b"\0\x3f\0"
    for before in (b"", b"\xff\xfe\0\x10" + content[scan : scan + 14]):
        several = content[:scan] + before + one + content[scan + 14 :]
        for claimed, kept in ((content, 0), (several, 2 * 3 * 64 * 48)):
            stream = io.BytesIO(claimed)
            assert _kept(Image.open(stream), stream) == kept


def test_many_pictures_that_take_no_room_are_refused(tmp_path: Path) -> None:
    file, content = folder(tmp_path), large()[3]
    for k in (1, 2, 3):
        file.with_name(f"{k}.png").write_bytes(content)
    (tmp_path / "train/a/1.png").write_bytes(content)
    refused(lambda: load("folder", root=tmp_path), str(tmp_path / "train"), "would unpack to")


# ---------------------------------------------------------------- weights


def safetensors(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + body


TWO = b'"shape":[1],"data_offsets":[0,4]}'
WEIGHTS = {
    "10 GB of header": safetensors(b"{", length=10**10),
    "all of 64 bits": safetensors(b"{}", length=2**64 - 1),
    "no JSON": safetensors(b"{nonsense"),
    "another JSON": safetensors(b"[]"),
    "metadata of numbers": safetensors(b'{"__metadata__":{"config":1}}'),
    "metadata of a list": safetensors(b'{"__metadata__":[]}'),
    "over each other": safetensors(
        b'{"a":{"dtype":"F32",' + TWO + b',"b":{"dtype":"F32",' + TWO + b"}", b"\0" * 4
    ),
    "more than there is": safetensors(
        b'{"a":{"dtype":"F32","shape":[9999999999],"data_offsets":[0,39999999996]}}'
    ),
    "no such type": safetensors(b'{"a":{"dtype":"X9",' + TWO + b"}", b"\0" * 4),
    "a pickle": b"\x80\x04K\1.",
    "a zip": b"PK\3\4" + b"\0" * 30,
    "nothing": b"",
}


@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "net.safetensors"
    file.write_bytes(content)
    for read in (tensor_files.load_weights, tensor_files.load_metadata):
        refused(lambda read=read: read(file), "net.safetensors")  # type: ignore[misc]


def test_a_file_of_holes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    size = 10**10
    words = f'{{"a":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    with file.open("wb") as out:
        out.write(safetensors(words))
        out.truncate(8 + len(words) + size)
    refused(lambda: tensor_files.load_weights(file), "net.safetensors", "would unpack to")


@pytest.mark.usefixtures("float32")
def test_a_tensors_name_does_not_fill_the_screen(tmp_path: Path) -> None:
    from tests.tiny import tiny_config, tiny_data
    from yopo.runs.build import build_model
    from yopo.runs.saved import Saved, load_model

    file, config, data = tmp_path / "net.safetensors", tiny_config(), tiny_data()
    state = dict(build_model(config.model, data.x_train, 4).state_dict())
    tensor_files.save_weights(file, state | {"9" * 5000: torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"another architecture .*999") as caught:
        load_model(Saved(config, file, trusted=True), data)
    assert len(str(caught.value)) < 600


# ---------------------------------------------------------------- what we wrote


def test_what_was_written_outlasts_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    for text in ("old", "new"):
        files.write_text(tmp_path / "file", text)
        assert disk.read(tmp_path, "file") == text.encode()
        assert not disk.has(tmp_path, ".file.writing")


def test_all_records_are_read() -> None:
    folders = [file.parent for file in (ROOT / "records").rglob("config.yaml")]
    assert len(folders) > 80
    assert len(read_runs(folders)) == len(folders)
