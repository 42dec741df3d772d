"""Functions of the user's own, which settings name as my_module:function."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def find(setting: str, named: str, returns: str) -> Callable[..., Any]:
    """The function; its module may lie in the working directory.

    setting: "model.name", for messages; of it a function build_model is expected to return that.
    """
    section = setting.partition(".")[0]
    module, _, function = named.partition(":")
    is_file = "/" in module or module.startswith(".") or module.endswith(".py")
    if is_file or not (module and function):
        raise ValueError(
            f"expected {setting} as my_module:build_{section}, for a file my_module.py in this "
            f"folder with a function build_{section}, got {named!r}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        build: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{setting} {named!r} does not import: {error}; "
            f"expected a file {module}.py in this folder with a function {function}"
        ) from None
    if not callable(build):
        raise ValueError(
            f"expected {named} to be a function that returns {returns}, got {type(build).__name__}"
        )
    return build


def takes(build: Callable[..., object], name: str) -> bool:
    """Whether a function has a parameter of that name."""
    return name in inspect.signature(build).parameters


def check_fits(
    setting: str, name: str, build: Callable[..., object], /, *args: object, **options: object
) -> None:
    """Refuse options that the function does not take; what goes wrong inside it is its own."""
    try:
        inspect.signature(build).bind(*args, **options)
    except TypeError as error:
        raise ValueError(f"{setting} do not fit {name}: {error}") from None
