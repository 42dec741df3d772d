"""Values of Python as JSON, and back: nothing is pickled, and nothing runs when they are read."""

import base64
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from yopo.core.files import ODD, parse_json

LARGEST = 40_000  # bytes of a text or a tensor in one piece; what is larger is no mere position
KINDS = {str(kind).removeprefix("torch."): kind for kind in (torch.uint8, torch.int8, torch.int16)}
KINDS |= {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.int32, torch.int64, torch.float32, torch.float64, torch.bool)
}

TAGS = {"int", "text", "bytes", "array", "tensor", "tuple", "dict"}


def told(value: object) -> Any:  # noqa: ANN401
    """The same as `plain`, of what can be read again; else a ValueError that says what cannot."""
    kept = plain(value)
    parse_json(json.dumps(kept), "what it holds", nan=True)
    return kept


def plain(value: object) -> Any:  # noqa: ANN401
    """A value for JSON: of numbers, texts, bytes, tensors, arrays, lists, tuples and dicts."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else {"int": str(value)}
    if isinstance(value, str):
        odd = len(value) > LARGEST or ODD.search(value)
        return {"text": _base64(value.encode())} if odd else value
    if isinstance(value, bytes):
        return {"bytes": _base64(value)}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return {"array": plain(torch.from_numpy(value.copy()))["tensor"]}
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in KINDS:
            raise ValueError(f"it holds a tensor of {kind}")
        raw = value.detach().cpu().contiguous().numpy().tobytes()
        return {"tensor": [kind, [*value.shape], _base64(raw)]}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(part) for part in value]}
    if isinstance(value, dict):
        keys = [plain(key) for key in value]
        if all(isinstance(key, str) for key in keys) and not (len(keys) == 1 and {*keys} <= TAGS):
            return {key: plain(part) for key, part in value.items()}
        return {
            "dict": [[key, plain(part)] for key, part in zip(keys, value.values(), strict=True)]
        }
    raise ValueError(f"it holds a {type(value).__name__}")


def restored(told: Any) -> Any:  # noqa: ANN401
    """The value that was told; a ValueError where it is none of ours."""
    if told is None or isinstance(told, bool | int | float | str):
        return told
    if isinstance(told, list):
        return [restored(part) for part in told]
    try:
        if len(told) != 1 or not {*told} <= TAGS:
            return {key: restored(part) for key, part in told.items()}
        ((kind, inside),) = told.items()
        match kind:
            case "int":
                return int(inside)
            case "text":
                return base64.b64decode(inside, validate=True).decode()
            case "bytes":
                return base64.b64decode(inside, validate=True)
            case "tuple":
                return tuple(restored(part) for part in inside)
            case "dict":
                return {restored(key): restored(part) for key, part in inside}
            case "tensor" | "array":
                name, shape, words = inside
                raw = bytearray(base64.b64decode(words, validate=True))
                kept = torch.frombuffer(raw, dtype=KINDS[name]) if raw else torch.empty(0)
                kept = kept.to(KINDS[name]).reshape(shape)
                return kept if kind == "tensor" else kept.numpy()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"it is no value that was written here: {error}") from None
    raise ValueError(f"it is no value that was written here: {kind}")


def _base64(raw: bytes) -> str:
    if len(raw) > LARGEST:
        raise ValueError(f"it holds {len(raw):,} bytes in one piece")
    return base64.b64encode(raw).decode()
