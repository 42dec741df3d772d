"""Runs in whose files every word is hostile, one by one or all at once."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.reports import write_run
from yopo.core import tensor_files
from yopo.paper.beside import beside
from yopo.report.page import page
from yopo.report.pictures import read_strips
from yopo.report.records import read_runs

HOSTILE = (
    '<img src=x onerror="ran=1">',
    '"><script>ran=1</script>',
    "'><svg onload='ran=1'>",
    "javascript:ran=1",
    "{{7*7}}{% for %}",
    "</script><script>ran=1</script>",
    "</style></pre></title><img src=http://127.0.0.1:9/y>",
    "\u2028ran=1\u2029\u202e",
    "-->]]><!--",
    '" onmouseover="ran=1" style="color:red',
)
FILES = ("config.yaml", "metrics.jsonl", "result.json", "eval.json", "model-last.eval.json")
EXAMPLES = "eval-examples.safetensors"
Place = tuple[str, tuple[Any, ...], bool]  # file, where in it, and whether it is a key


def load(file: Path) -> Any:
    text = file.read_text()
    if file.suffix == ".yaml":
        return yaml.safe_load(text)
    return (
        [json.loads(line) for line in text.splitlines()]
        if "jsonl" in file.name
        else json.loads(text)
    )


def save(file: Path, tree: Any) -> None:
    if file.suffix == ".yaml":
        file.write_text(yaml.safe_dump(tree))
    elif "jsonl" in file.name:
        file.write_text("".join(json.dumps(line) + "\n" for line in tree))
    else:
        file.write_text(json.dumps(tree))


def write_full_run(folder: Path) -> Path:
    """A run in which every part of the page has something to show."""
    over = {"notes": "a note", "data": {"name": "npz", "path": "data/digits.npz"}}
    warnings = [{"code": "masked", "text": "a warning"}]
    write_run(folder, over, warnings=warnings, epochs=3)
    lines = load(folder / "metrics.jsonl")
    for line in lines:
        line |= {"rate": 0.1}
    lines[1] |= {"collapse": "the loss is not finite", "action": "rollback"}
    save(folder / "metrics.jsonl", lines)
    result = load(folder / "result.json")
    result["environment"] |= {"commit": "abc", "finished": "today"}
    save(folder / "result.json", result)
    found = load(folder / "eval.json")
    found["attacks"]["cw"] |= {"after": {"apgd-ce": 0.5}, "accuracy": 0.01}
    found["about"] |= {"commit": "abc", "images_sha256": "ef" * 32}
    counts = {"images": 5, "clean": 4, "worst": 3}
    found["classes"] = [{"name": f"class {i}", **counts} for i in range(2)]
    found["confusion"] = [[3, 2], [1, 4]]
    found["radii"] = {"attack": "pgd-10", "eps": [0.05, 0.1], "accuracy": [0.8, 0.4]}
    save(folder / "eval.json", found)
    other = copy.deepcopy(found)
    other["about"] |= {"weights": "net.safetensors", "images": 50}
    save(folder / "model-last.eval.json", other)
    images = torch.rand(9, 1, 4, 4, dtype=torch.float32)
    tensors = {"images": images, "clean": (255 * images).to(torch.uint8)}
    tensors |= {"labels": torch.arange(9), "answers": torch.arange(9).flip(0)}
    tensor_files.save_weights(
        folder / EXAMPLES,
        {f"{name}.{k}": t for name in ("cw", "same") for k, t in tensors.items()},
        {"names": json.dumps([f"class {i}" for i in range(9)]), "same": "pgd-40"},
    )
    return folder


def places(folder: Path) -> Iterator[Place]:
    """Every word in a run's files."""
    for file in FILES:
        for where, key in walk(load(folder / file)):
            yield file, where, key


def walk(tree: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool]]:
    if isinstance(tree, str):
        yield where, False
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(key, str):
                yield (*where, key), True
            yield from walk(value, (*where, key))


def put(tree: Any, place: Place, evil: str) -> Any:
    """The tree with one word replaced."""
    tree = copy.deepcopy(tree)
    *path, last = place[1]
    at = tree
    for key in path:
        at = at[key]
    if place[2]:
        renamed = {(evil if k == last else k): v for k, v in at.items()}
        at.clear()
        at.update(renamed)
    else:
        at[last] = evil
    return tree


def shown(*folders: Path) -> str | None:
    """The page on these runs; None where a file is refused with a sentence."""
    try:
        runs = read_runs(list(folders))
        strips = [strip for run in runs for strip in read_strips(run)]
    except ValueError:
        return None
    return page(runs, strips, beside(runs, "table2"))


def spoil(folder: Path, evil: Callable[[int], str]) -> int:
    """Make as many words hostile as the report still reads; how many."""
    count = 0
    facts = {"names": json.dumps([evil(i) for i in range(9)]), "same": evil(9)}
    tensor_files.save_weights(
        folder / EXAMPLES, tensor_files.load_weights(folder / EXAMPLES), facts
    )
    for place in list(places(folder)):
        if place[2]:
            continue
        file = folder / place[0]
        before = load(file)
        save(file, put(before, place, evil(count)))
        if shown(folder) is None:
            save(file, before)
        else:
            count += 1
    return count


def rename(folder: Path, evil: str) -> Path:
    """The run in a folder of that name."""
    target = folder.with_name(evil.replace("/", "\u2215"))
    shutil.move(folder, target)
    return target
