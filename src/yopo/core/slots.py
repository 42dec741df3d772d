"""Which buffers a network has: some networks fill, add or drop buffers of their own in a pass."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

GONE, EMPTY, OTHER = range(3)  # what became of a buffer
Kind = tuple[torch.Size, torch.dtype]
State = Mapping[str, Tensor]


class Slots:
    """A network's buffers by name, as they were when this was made; one may be empty (None).

    `marks` are what a state_dict does not tell of those of now, and with them `fit` makes a network
    have the buffers of a saved state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made = {name: _kind(b) for name, b in _buffers(model).items()}

    def marks(self) -> dict[str, Tensor]:
        """What became of buffers, as numbers (); nothing of one that was empty and was filled."""
        now = _buffers(self._model)
        marks = {name: GONE for name in self._made if name not in now}
        for name, buffer in now.items():
            if name not in self._made or self._made[name] not in (None, _kind(buffer)):
                marks[name] = EMPTY if buffer is None else OTHER
        return {name: torch.tensor(mark, dtype=torch.uint8) for name, mark in marks.items()}

    def fit(self, shown: State, hidden: State, marks: State) -> None:
        """Have the buffers of a state: its state_dict, buffers that are not persistent, and marks.

        Their values are yet to be loaded; those that fit stay where they are. What the state lacks,
        or has without a mark, stays wrong.
        """
        values = {**shown, **hidden}
        marked = {name: int(mark) for name, mark in marks.items()}
        modules = dict(self._model.named_modules())
        device = next((p.device for p in self._model.parameters()), None)
        loaded: dict[int, Tensor] = {}  # what each tensor is to hold, by its id
        for full in {**_buffers(self._model), **self._made, **marked}:
            path, _, name = full.rpartition(".")
            if (module := modules.get(path)) is None:
                continue
            made, mark, value = self._made.get(full), marked.get(full), values.get(full)
            there = module._buffers.get(name)
            fits = _kind(there) == _kind(value)
            if value is not None and fits:  # one tensor cannot hold two values
                fits = torch.equal(loaded.setdefault(id(there), value), value)
            if mark == GONE or (mark is None and full not in self._made):
                module._buffers.pop(name, None)
            elif mark == EMPTY or (value is None and made is None):
                module._buffers[name] = None
            elif value is not None and not fits and (mark == OTHER or made in (None, _kind(value))):
                module._buffers[name] = torch.empty_like(value, device=device)
            if value is not None:
                unshown = module._non_persistent_buffers_set
                (unshown.add if full in hidden else unshown.discard)(name)


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """The empty ones, too."""
    buffers: dict[str, Tensor | None] = {}
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        buffers |= {inside + name: buffer for name, buffer in module._buffers.items()}
    return buffers


def _kind(buffer: Tensor | None) -> Kind | None:
    return None if buffer is None else (buffer.shape, buffer.dtype)
