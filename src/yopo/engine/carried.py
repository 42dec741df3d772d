"""What a method carries from batch to batch, in tensors that stay where they are."""

import torch
from torch import Tensor

from yopo.methods.base import Method, carried_over


class Carried:
    """A captured step knows these tensors by their addresses, so they are only ever written to.

    The method that the user holds and the forms of it that run share them.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self.tensors: dict[str, Tensor] = {}
        self._may_move = False  # the tensors, since nothing knows their addresses

    def renew(self) -> None:
        """Before batches of another shape: what the next step leaves has its own."""
        self._may_move = True

    def take(self) -> None:
        """Before a step: what the user's method was given since the last, as by a checkpoint."""
        state = self._method.state_dict()
        for name, tensor in self.tensors.items():
            if name not in state:
                tensor.zero_()
            elif state[name] is not tensor:
                tensor.copy_(_fitting(state[name], tensor))
        self.tensors |= {k: v for k, v in state.items() if k not in self.tensors}
        self._method.load_state_dict(self.tensors)

    def keep(self, running: Method) -> None:
        """After a step of one form: what it leaves, in the size of the first batch."""
        for name, left in running.state_dict().items():
            there = self.tensors.get(name)
            if there is None or (self._may_move and there.shape != left.shape):
                self.tensors[name] = torch.zeros_like(left)
            tensor = self.tensors[name]
            tensor.copy_(_fitting(left, tensor))
        self._may_move = False
        for method in (self._method, running):
            method.load_state_dict(self.tensors)


def _fitting(state: Tensor, tensor: Tensor) -> Tensor:
    """A state for that tensor, which may be of batches of another shape."""
    return state if state.shape == tensor.shape else carried_over(state, tensor)
