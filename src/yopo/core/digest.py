"""SHA-256 of tensors and values: what tells weights and data apart."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from yopo.core.parallel import whole


def values_digest(*values: object) -> str:
    """Of tensors, by type, shape and bytes, and of other values by their repr."""
    return _go_on(hashlib.sha256(), values)


def _go_on(sha: "hashlib._Hash", values: Iterable[object]) -> str:
    for value in values:
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sha.update(raw(value))
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()


def parts_digest(length: int, parts: Iterable[Tensor], *others: object) -> str:
    """`values_digest(x, *others)` of an x of that length that comes in parts (b, ...)."""
    parts = iter(parts)
    sha, first = hashlib.sha256(), next(parts)
    sha.update(f"{first.dtype} {(length, *first.shape[1:])}".encode())
    for part in chain([first], parts):
        sha.update(raw(part))
    return _go_on(sha, others)


def weights_digest(model: nn.Module) -> str:
    """Of all parameters and buffers with their names."""
    return values_digest(*(part for k, v in model.state_dict().items() for part in (k, whole(v))))


def tensors_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Of named tensors, by type, shape and bytes, and of the words beside them; in any order."""
    sha = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(raw(tensor))
    return sha.hexdigest()


def raw(tensor: Tensor) -> bytes | memoryview:
    """A tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
