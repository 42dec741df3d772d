"""Names of modules as the user says them: those of the network, whatever stands around it."""

import difflib
from collections.abc import Iterator

from torch import nn

# Where torch.compile, DistributedDataParallel, AveragedModel, Fabric, sharding and checkpointing
# keep the module that they were given.
AROUND = (
    "module",
    "_orig_mod",
    "_forward_module",
    "_original_module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, in the order of `named_modules`, without wrappers in its name."""
    for path, module in model.named_modules():
        yield said(model, path), module


def said(model: nn.Module, path: str) -> str:
    """A module's path in the model without the wrappers that it leads through."""
    parts: list[str] = []
    for part in path.split(".") if path else ():
        if not _is_around(model, part):
            parts.append(part)
        model = model.get_submodule(part)
    return ".".join(parts)


def module_named(model: nn.Module, name: str) -> nn.Module:
    """The module of that name, which may have wrappers in it or not."""
    given: object = name
    if not isinstance(given, str):
        raise TypeError(
            f"expected first_layer as a module's name, as 'conv1', got {type(name).__name__}; "
            "model.named_modules() lists them"
        )
    paths: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name in paths and said(model, name):
        return paths[name]
    names: dict[str, nn.Module] = {}
    for path, module in paths.items():
        names.setdefault(said(model, path), module)  # of a compiled one, not what is inside
    bare = ".".join(part for part in name.split(".") if part not in AROUND)
    for known in (name, bare):
        if known and known in names:
            return names[known]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or [n for n in names if n][:3]
    raise ValueError(
        f"no module {name!r} in the model for first_layer; near names: {', '.join(near)}"
    )


def _is_around(parent: nn.Module, part: str) -> bool:
    """Whether the parent is a wrapper, and that part what it wraps."""
    if part == "module":  # a name that people give, too
        return list(parent._modules) == [part] and not isinstance(parent, nn.Sequential)
    return part in AROUND
