"""Finished pieces of an evaluation on disk, so that an interrupted one goes on where it was."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from yopo.core.threat import Threat
from yopo.evaluation.suite import Piece

logger = logging.getLogger(__name__)


class Journal:
    """One small safetensors file for each finished batch, each written whole or not at all.

    The folder's name is made from what is evaluated, so that other weights, data or settings never
    meet these pieces.
    """

    def __init__(self, folder: Path, identity: str, examples: bool, first: bool = True) -> None:
        self.parent, self.folder = folder, folder / identity[:16]
        self.examples, self.first = examples, first
        self.answers: Tensor | None = None

    def meet(self, answers: Tensor) -> None:
        """Forget the pieces if the network answers otherwise than the one they were made with.

        Its weights and settings are the same; what it computes with them may not be.
        """
        from yopo.core import tensor_files

        path = self.folder / "network.safetensors"
        try:
            before = tensor_files.load_weights(path)["answers"] if path.exists() else answers
        except (ValueError, KeyError, OSError):
            before = answers[:0]
        alike = before.shape == answers.shape and before.dtype == answers.dtype
        if not alike or (before - answers).norm() > 0.02 * before.norm():
            self.clear()
        self.answers = answers

    def recall(self, key: str) -> Piece | None:
        """The piece of that key, if it was kept and can be read."""
        from yopo.core import tensor_files

        path = self.folder / f"{key}.safetensors"
        try:
            t = tensor_files.load_weights(path) if path.exists() else {}
            images = t["images"] if self.examples else torch.empty(0)
            rows, wrong, spent = t["rows"], t["wrong"], t["seconds_and_cost"]
            whole = rows.dtype == torch.long and wrong.dtype == torch.bool
            fits = wrong.shape == rows.shape == (len(rows),) if rows.dim() else False
            known = spent.shape == (2,) and bool(spent.isfinite().all())
            if not (whole and fits and known):
                return None
            if self.examples and (images.dim() < 2 or len(images) != int(wrong.sum())):
                return None
            return Piece(rows, wrong, images, *map(float, spent))
        except (ValueError, KeyError, OSError):
            return None  # not there, damaged, or without the images that are wanted now

    def keep(self, key: str, piece: Piece) -> None:
        """Write a piece."""
        tensors = {
            "rows": piece.rows,
            "wrong": piece.wrong,
            "seconds_and_cost": torch.tensor([piece.seconds, piece.cost], dtype=torch.float64),
        }
        if self.examples:
            tensors["images"] = piece.images
        # Of several processes that keep their batches here the first one says which network it is.
        if (
            self.first
            and self.answers is not None
            and not (self.folder / "network.safetensors").exists()
        ):
            self._write("network", {"answers": self.answers})
        self._write(key, tensors)

    def _write(self, key: str, tensors: dict[str, Tensor]) -> None:
        """A disk that is full costs the chance to resume, not the evaluation."""
        from yopo.core import tensor_files

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tensor_files.save_weights(self.folder / f"{key}.safetensors", tensors, {})
        except OSError as error:
            logger.warning("could not keep a finished batch (%s); going on", error)

    def clear(self) -> None:
        """Forget this evaluation; those of other weights or settings stay."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # another process may be faster
            if self.parent.is_dir() and not any(self.parent.iterdir()):
                self.parent.rmdir()


def told(threat: Threat) -> str:
    """The threat in words that no other has; by default Python names an object's address."""
    words = repr(threat)
    if type(threat).__repr__ is object.__repr__ and hasattr(threat, "__dict__"):
        words = f"{type(threat).__qualname__} {vars(threat)}"
    if " at 0x" in words:
        raise ValueError(
            f"cannot tell this {type(threat).__name__} from others when an evaluation goes on from "
            "`state`; give its class a __repr__ that names its numbers"
        )
    return words
