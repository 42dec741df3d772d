"""What a method carries from batch to batch, and the tensors in which a captured step knows it."""

import torch
from torch import Tensor

from yopo.methods.base import Method, carried_over


class Carried:
    """The state that the plain loop would have, in the shape of the last batch.

    The method that the user holds and the forms of it that run share it. A captured step knows it
    by the addresses of tensors in the shape of its own batch, which are only ever written to.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self.tensors: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}  # of them, where batches are like the first

    def renew(self) -> None:
        """Before batches of another shape: nothing knows the addresses any more."""
        self._fixed = {}

    def take(self) -> None:
        """Before a step: what the user's method was given since the last, as by a checkpoint."""
        self.tensors = dict(self._method.state_dict())

    def fix(self) -> None:
        """Before a captured step: into the tensors that it reads."""
        for name, tensor in self._fixed.items():
            if name not in self.tensors:
                tensor.zero_()
            elif self.tensors[name] is not tensor:
                tensor.copy_(carried_over(self.tensors[name], tensor))
        self.go_on_from(self._fixed)

    def keep(self, running: Method) -> None:
        """After a step of one form: what it leaves, of whatever shape."""
        left = dict(running.state_dict())
        for name, tensor in left.items():
            if name not in self._fixed:
                self._fixed[name] = torch.zeros_like(tensor)
            fixed = self._fixed[name]
            if (fixed.shape, fixed.dtype) == (tensor.shape, tensor.dtype):
                left[name] = fixed.copy_(tensor)
        self.go_on_from(left)
        running.load_state_dict(self.tensors)

    def go_on_from(self, tensors: dict[str, Tensor]) -> None:
        """Go on from these very tensors."""
        self.tensors = dict(tensors)
        self._method.load_state_dict(self.tensors)
