"""One file of a data set: npz, IDX, a batch of CIFAR-10, a picture. None can run code or overflow.

A file's own words about its size are checked before memory is asked for.
"""

import gzip
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from yopo.core.files import check_unpacked, open_plain, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

Bytes = NDArray[np.uint8]
Box = tuple[int, int, int, int]  # left, top, right, bottom
Choose = Callable[[int, int], Box]  # chooses a part of a picture of that width and height
PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # EPS would start Ghostscript
REPAIR = "; repair or remove it"  # what becomes of a picture that cannot be read
PIXELS = 25_000_000  # of a picture in memory; up to 14 bytes each while it is read
JPEG_PIXELS = 125_000_000  # of a JPEG that is made smaller while it is decoded
JPEG_BYTES = 400_000_000  # that the decoder may keep meanwhile, where it must see all of it first
OF_A_FILE = 64 << 20  # bytes; MNIST's largest has 47 million, CIFAR-10's 31


def read_npz(path: Path, keys: Collection[str]) -> dict[str, NDArray[Any]]:
    """Arrays of an npz."""
    with open_plain(path) as file:
        packed = os.fstat(file.fileno()).st_size
        if not zipfile.is_zipfile(file):
            raise ValueError("expected an npz, got another or damaged file; use np.savez")
        with zipfile.ZipFile(file) as archive:
            there = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            if missing := [key for key in keys if key not in there]:
                raise ValueError(
                    f"expected arrays {', '.join(keys)}, got {', '.join(there)[:200] or 'none'}; "
                    f"add {', '.join(missing)}"
                )
            check_unpacked(path, sum(there[key].file_size for key in keys), packed)
            return {key: _read_array(archive, there[key]) for key in keys}


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in header:
            raise ValueError(f"{member.filename} is of version {version}; use np.savez")
        shape, _, dtype = header[version](file)
        if math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} is too small for its shape {shape}")
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


def read_idx_file(file: Path) -> Bytes:
    """An IDX file, packed with gzip or not."""
    content = read_bytes(file, OF_A_FILE)
    if file.suffix == ".gz":
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
            content = unpacked.read(OF_A_FILE + 1)
        if len(content) > OF_A_FILE:
            raise ValueError(f"expected at most {OF_A_FILE:,} bytes, got more; is it of MNIST?")
    return read_idx(content)


def read_idx(content: bytes) -> Bytes:
    """An IDX file of unsigned bytes: two zeros, type 8, number of dimensions, sizes, values."""
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError(
            f"expected an IDX file of unsigned bytes, got {content[:4]!r} at its start"
        )
    dims = content[3]
    shape = [int(n) for n in np.frombuffer(content, ">u4", count=dims, offset=4)]
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dims)
    if values.size != math.prod(shape):
        raise ValueError(f"expected {shape} values, got {values.size}; the file is cut short")
    return values.reshape(shape)


# --- CIFAR-10


def read_batch(file: Path) -> tuple[Bytes, NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and labels of one file of CIFAR-10's Python version."""
    content = _Unpickler(io.BytesIO(read_bytes(file, OF_A_FILE)), encoding="bytes").load()
    if not isinstance(content, dict):
        raise ValueError(f"expected a dict, got {type(content).__name__}")
    batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    if not {"data", "labels"} <= batch.keys():
        raise ValueError(f"expected 'data' and 'labels', got {', '.join(map(str, batch))[:200]}")
    x, y = batch["data"], batch["labels"]
    if not isinstance(x, _Array) or x.dtype != "u1" or not isinstance(x.raw, bytes):
        raise ValueError(f"expected uint8 images in 'data', got {getattr(x, 'dtype', type(x))}")
    if not isinstance(y, list) or not all(isinstance(label, int) for label in y):
        raise ValueError("expected a list of whole numbers in 'labels'")
    return np.frombuffer(x.raw, np.uint8).reshape(-1, 3, 32, 32), np.array(y, np.int64)


class _Array:
    """What a pickle says of a numpy array; numpy itself reads none of it."""

    dtype: object = None
    raw: object = None

    def __setstate__(self, state: tuple[object, ...]) -> None:
        _, _, kind, _, self.raw = state
        self.dtype = getattr(kind, "name", None)


class _Kind:
    """The same of a type of numbers."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Its byte order, of which a byte has none."""


class _Unpickler(pickle._Unpickler):  # Python's own: that in C takes memory for what it is told
    """A pickle can name any function to call; this one reads plain values and numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        known: dict[tuple[str, str], Callable[..., object]] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy", "ndarray"): lambda *_: None,
            ("numpy", "dtype"): _Kind,
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # protocol 2 has no bytes
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}, which CIFAR-10 has not")
        return known[module, name]


# --- pictures


def check_side(size: int | None) -> None:
    """Refuse a side that pictures cannot be brought to, before there is room for one."""
    most = math.isqrt(PIXELS)
    if size is not None and not 1 <= size <= most:
        raise ValueError(f"expected size from 1 to {most:,}, got {size:,}")


def read_picture(  # (H, W, 3)
    file: Path,
    size: int | None,
    mode: str = "RGB",
    cut: Choose | None = None,
    least: int = 0,
    *,
    turned: bool = True,
) -> Bytes:
    """A picture as RGB; with `size`, its shorter side brought to that, and the centre cut out.

    (H, W) for the mode "L". With `cut`, the part that this chooses is brought to size x size.
    least: pixels of its shorter side that are wanted, where it is no `size`: only a JPEG that is
    too large for memory has fewer than in the file. turned: as the camera was held, where the file
    says it (EXIF); else as it is stored.
    """
    try:
        with open_plain(file) as stream:
            return decode(stream, size, mode, cut, least, turned=turned)
    except ImportError:
        raise
    except FileNotFoundError:
        raise ValueError(f"no file {file}") from None
    except Exception as error:  # what pillow raises on damaged files can be anything
        raise ValueError(f"cannot read {file}: {said(error)}{REPAIR}") from error


def decode(
    stream: BinaryIO,
    size: int | None = None,
    mode: str = "RGB",
    cut: Choose | None = None,
    least: int = 0,
    *,
    turned: bool = True,
) -> Bytes:
    """The same from an open file; (H, W) for the mode "L"."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading pictures needs pillow; run `pip install pillow`") from error
    with warnings.catch_warnings(action="ignore"), _opened(stream) as opened:
        if opened.width * opened.height > PIXELS:
            _draft(opened, stream, least if size is None else size)
        width, height = opened.size
        if width * height < 1:
            raise ValueError(f"it has {width}x{height} pixels, expected 1 to {PIXELS:,}")
        image = of_8_bits(opened, mode)
        if turned:
            with suppress(Exception):  # what it says of how the camera was held may be damaged
                ImageOps.exif_transpose(image, in_place=True)
        width, height = image.size
    if cut is not None:
        sides = (size, size) if size is not None else image.size
        image = image.resize(sides, Image.Resampling.BILINEAR, box=cut(*image.size))
    elif size is not None:
        scale = size / min(width, height)
        width, height = max(size, round(width * scale)), max(size, round(height * scale))
        if width * height > PIXELS:
            raise ValueError(f"with a size of {size} it would be {width}x{height}; cut it first")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image)


def of_8_bits(opened: "Image", mode: str) -> "Image":
    """One of pillow's pictures with 8 bits a colour; 16 are scaled, which convert() would clip."""
    from PIL import Image

    of_16_bits = opened.mode == "I" and getattr(opened, "format", None) in ("PNG", "PPM")
    if opened.mode.startswith("I;16") or of_16_bits:
        values = np.asarray(opened).astype(np.uint32)
        values += 128
        values //= 257
        scaled = Image.fromarray(values.astype(np.uint8))
        scaled.info = opened.info
        return scaled.convert(mode)
    if opened.mode in ("I", "F"):
        raise ValueError("its pixels have no known range; save it with 8 or 16 bits")
    return opened.convert(mode)


def _draft(opened: "ImageFile", stream: BinaryIO, least: int) -> None:
    """Let a JPEG that is too large for memory be decoded to ½, ¼ or ⅛ of its sides, or refuse."""
    width, height = opened.size
    said = f"it has {width}x{height} pixels, expected 1 to {PIXELS:,}"
    if opened.format != "JPEG":
        raise ValueError(f"{said}, or a JPEG; save it smaller, or as JPEG")
    if width * height > JPEG_PIXELS or _kept(opened, stream) > JPEG_BYTES:
        raise ValueError(f"{said} for a JPEG of this kind; save it smaller")
    if not least:
        raise ValueError(f"{said}; save it smaller, or give --data.size 64")
    scale = least / min(width, height)
    opened.draft(None, (math.ceil(width * scale), math.ceil(height * scale)))
    if opened.width * opened.height > PIXELS:
        raise ValueError(f"{said} where a side of {least:,} is wanted; save it smaller")


def _kept(opened: Any, stream: BinaryIO) -> int:  # noqa: ANN401
    """Bytes of coefficients that a JPEG in several scans has in memory, however small it is made.

    pillow has read as far as the head of the first scan, which says how many colours are in it.
    """
    many = len(opened.layer)
    whole = b"\xff\xda\0" + bytes([6 + 2 * many, many])
    stream.seek(-8 - 2 * many, os.SEEK_CUR)
    if stream.read(5) == whole and not opened.info.get("progressive"):
        return 0  # all are in one scan, which is decoded row by row
    sides = [(across, down) for _, across, down, _ in opened.layer]
    most = max(across for across, _ in sides) * max(down for _, down in sides)
    return int(2 * opened.width * opened.height * sum(a * d for a, d in sides) / max(1, most))


def _opened(stream: BinaryIO) -> "ImageFile":
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(stream, formats=FORMATS)
    except Image.DecompressionBombError:  # pillow's own limit, for what it was made to read
        raise ValueError(
            f"it has more pixels than any picture that is read: {PIXELS:,}, of a JPEG up to "
            f"{JPEG_PIXELS:,}; save it smaller"
        ) from None
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(FORMATS)}, or damaged") from None


def said(error: Exception) -> str:
    """An error's words in one line, without numbers and names of files; some have none."""
    words = getattr(error, "strerror", None) or str(error)
    return " ".join(words.split()) or type(error).__name__
