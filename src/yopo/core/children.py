"""Networks that do nothing but run their children one after the other, as Sequential does."""

from collections.abc import Iterator

from torch import nn


def in_a_row(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of those that run one after the other, if the model is nothing else."""
    return list(_children(model)) if _is_row(model) else []


def _children(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every child, Sequentials inside opened up."""
    for name, child in model._modules.items():  # named_children leaves out repeated ones
        if child is not None and _is_row(child):
            yield from _children(child, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


def _is_row(module: nn.Module) -> bool:
    """Whether running the children one by one is the same as running the module."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    own = "forward" in vars(module)  # put over its class's, as mixed precision does
    return type(module).forward is nn.Sequential.forward and not own and not any(hooks)
