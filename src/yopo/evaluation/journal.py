"""Finished pieces of an evaluation on disk, so that an interrupted one goes on where it was."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from yopo.core import seals
from yopo.core.threat import Threat
from yopo.evaluation.suite import Piece

logger = logging.getLogger(__name__)
NETWORK = "network"  # by which it is known again


class Journal:
    """One small safetensors file for each finished batch, each written whole or not at all.

    The folder's name is made from what is evaluated, so that other weights, data or settings never
    meet these pieces; their checksums from a secret of the user's, so that nobody else makes any.
    """

    def __init__(self, folder: Path, identity: str, examples: bool, first: bool = True) -> None:
        self.parent, self.folder, self.identity = folder, folder / identity[:16], identity
        self.examples, self.first = examples, first
        self.answers: Tensor | None = None
        self._warned = False

    def meet(self, answers: Tensor) -> None:
        """Forget the pieces if the network answers otherwise than the one they were made with.

        Its weights and settings are the same; what it computes with them may not be.
        """
        before = answers
        if self._file(NETWORK).exists():
            before = self._read(NETWORK).get("answers", answers[:0])
        alike = before.shape == answers.shape and before.dtype == answers.dtype
        if not alike or (before - answers).norm() > 0.02 * before.norm():
            self.clear()
        self.answers = answers

    def recall(self, key: str) -> Piece | None:
        """The piece of that key, if it was kept here, with the images if they are wanted now."""
        t = self._read(key) if self._file(key).exists() else {}
        if not t or (self.examples and "images" not in t):
            return None
        images = t["images"] if self.examples else torch.empty(0)
        return Piece(t["rows"], t["wrong"], images, *t["seconds_and_cost"].tolist())

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
        if self.first and self.answers is not None and not self._file(NETWORK).exists():
            self._write(NETWORK, {"answers": self.answers})
        self._write(key, tensors)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _key(self, key: str) -> bytes:
        return seals.key_for("evaluation", self.identity, key)

    def _read(self, key: str) -> dict[str, Tensor]:
        """What `_write` wrote; nothing if somebody else did, or if it is damaged."""
        from yopo.core import tensor_files

        try:
            return tensor_files.load_weights(self._file(key), key=self._key(key))
        except (ValueError, OSError) as error:
            self._warn("finished batches that are damaged, or not yours, are computed again", error)
            return {}

    def _write(self, key: str, tensors: dict[str, Tensor]) -> None:
        """A disk that is full costs the chance to resume, not the evaluation."""
        from yopo.core import tensor_files

        try:
            seal = self._key(key)
            self.folder.mkdir(parents=True, exist_ok=True)
            tensor_files.save_weights(self._file(key), tensors, {}, key=seal)
        except OSError as error:
            self._warn("could not keep a finished batch; going on", error)

    def _warn(self, what: str, error: Exception) -> None:
        """Once: what is wrong with one batch is wrong with many."""
        if not self._warned:
            logger.warning("%s (%s)", what, error)
        self._warned = True

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
