"""Settings as plain nested values: what is put over others, and what flags say."""

from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]  # nested: {"method": {"name": "yopo", "m": 5}, "epochs": 40}


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """`over` on top of `base`, at every depth.

    With another method or threat (a recipe for yopo, a flag for pgd), what the base says about the
    old one no longer applies and is dropped, its m in earlier phases too; so are the options of
    another model, and the sizes that pictures are brought to, of other data.
    """
    result = dict(base)
    renamed = {key for key, value in over.items() if _renames(base.get(key), value)}
    for section, below in base.items():
        if isinstance(below, Mapping):
            result[section] = {k: v for k, v in below.items() if not _goes(section, k, renamed)}
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = overlay(below, value)
        else:
            result[key] = value
    return result


def _renames(below: object, value: object) -> bool:
    """Whether a section names another thing than the one below it."""
    if not (isinstance(below, Mapping) and isinstance(value, Mapping)):
        return False
    return "name" in value and "name" in below and value["name"] != below["name"]


def _goes(section: str, key: str, renamed: set[str]) -> bool:
    """Whether a setting is the own of a thing that is now another."""
    if section == "schedule":
        return ("method" in renamed and key == "m") or ("data" in renamed and key == "sizes")
    own = {"model": "options", "data": "size"}
    named = section in ("method", "threat") or own.get(section) == key
    return section in renamed and named


def nested(flags: Mapping[str, str]) -> Tree:
    """{"method.m": "5"} as {"method": {"m": "5"}}; "model.options.width" goes into options."""
    tree: Tree = {}
    for dotted, value in flags.items():
        *path, last = dotted.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ValueError(f"--{dotted} does not go together with --{'.'.join(path)}")
        branch[last] = value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """{"method": {"m": 5}} as {"method.m": 5}."""
    leaves: Tree = {}
    for key, value in tree.items():
        inside = isinstance(value, Mapping) and value
        leaves |= flat(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return leaves
