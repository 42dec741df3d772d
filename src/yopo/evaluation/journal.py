"""Finished pieces of an evaluation on disk, so that an interrupted one goes on where it was."""

import hashlib
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from yopo.evaluation.suite import Piece


class Journal:
    """One small safetensors file for each finished batch, each written whole or not at all.

    The folder's name is made from what is evaluated, so that other weights, data or settings never
    meet these pieces.
    """

    def __init__(self, folder: Path, identity: str, examples: bool) -> None:
        self.parent, self.folder = folder, folder / identity[:16]
        self.examples = examples

    def recall(self, key: str) -> Piece | None:
        """The piece of that key, if it was kept and can be read."""
        from yopo import checkpoint

        path = self.folder / f"{key}.safetensors"
        try:
            t = checkpoint.load_weights(path) if path.exists() else {}
            images = t["images"] if self.examples else torch.empty(0)
            seconds, cost = t["seconds_and_cost"].tolist()
            return Piece(t["rows"], t["wrong"], images, seconds, cost)
        except (ValueError, KeyError, OSError):
            return None  # not there, damaged, or without the images that are wanted now

    def keep(self, key: str, piece: Piece) -> None:
        """Write a piece; a disk that is full costs the chance to resume, not the evaluation."""
        from yopo import checkpoint

        tensors = {
            "rows": piece.rows,
            "wrong": piece.wrong,
            "seconds_and_cost": torch.tensor([piece.seconds, piece.cost], dtype=torch.float64),
        }
        if self.examples:
            tensors["images"] = piece.images
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save_weights(self.folder / f"{key}.safetensors", tensors, {})
        except OSError as error:
            warnings.warn(f"could not keep a finished batch ({error}); going on", stacklevel=2)

    def clear(self) -> None:
        """Forget this evaluation; those of other weights or settings stay."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.parent.is_dir() and not any(self.parent.iterdir()):
            self.parent.rmdir()


def digest(*values: object) -> str:
    """SHA-256 of tensors, by type, shape and bytes, and of other values by their repr."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().flatten()
            sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names."""
    return digest(*(part for item in model.state_dict().items() for part in item))
