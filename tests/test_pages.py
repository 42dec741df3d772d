"""Every block of Python in the docs is run as it stands there: most of them here."""

import ast
import inspect
import re
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import yopo
from tests.pages import DOCS, FENCE, ROOT, SITE, fenced, prose
from tests.published import write_network
from tools import look_up
from tools.docstrings import as_rst
from yopo.data import sources
from yopo.runs import hub, recipes, tracking
from yopo.runs.api import configure, train_run

# Pages whose blocks other tests run, and the file that does it.
ELSEWHERE = {
    "data.md": "frameworks/test_data_page.py",
    "extending.md": "test_extending.py",
    **{
        f"frameworks/{name}.md": f"frameworks/test_{name}.py"
        for name in ("accelerate", "fabric", "lightning", "ray", "timm", "trainer")
    },
}
Page = tuple[str, int]


def blocks() -> dict[Page, str]:
    """Each by its page and its place there. The tutorials' are run by `make docs`."""
    return {
        (page.relative_to(DOCS).as_posix(), place): block
        for page in SITE
        for place, block in enumerate(fenced(page.read_text(encoding="utf-8"), "python"))
    }


BLOCKS = blocks()
HERE = [page for page in BLOCKS if page[0] not in ELSEWHERE]


class Blocks(nn.Module):
    """A network with what blocks of the pages ask of one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)])
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.conv1(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.fixture
def names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32: None
) -> Iterator[dict[str, Any]]:
    """What a reader has when he comes to a block, in a folder of his own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(yopo, "Engine", partial(yopo.Engine, compile=False))
    model = Blocks()
    x = torch.rand(4, 3, 10, 10)
    y = model(x).argmin(1)  # all wrong: there is nothing left for long attacks
    threat = yopo.Linf(8 / 255)
    yield {
        "__name__": "a page",
        "yopo": yopo,
        "torch": torch,
        "model": model,
        "network": Blocks(),
        "method": yopo.PGD(model, threat, steps=2),
        "optimizer": torch.optim.SGD(model.parameters(), 0.01),
        "threat": threat,
        "loader": DataLoader(TensorDataset(x, y), batch_size=2),
        "x": x,
        "y": y,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
        "fully_shard": fully_shard,
        "Path": Path,
        "train_run": train_run,
        "config": configure("demo", {"epochs": 1, "model": {"options": {"width": 2}}}),
    }
    if dist.is_initialized():
        dist.destroy_process_group()


Prepared = Callable[[pytest.MonkeyPatch], None]


def a_group(_: pytest.MonkeyPatch) -> None:
    """One process, among processes."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells each process, and fewer digits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    few(monkeypatch)


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few digits for a small network."""
    x_train, y_train, x_test, y_test = sources.mnist_subset()
    rows = torch.arange(0, 6000, 5), torch.arange(0, 2000, 4)
    some = x_train[rows[0]], y_train[rows[0]], x_test[rows[1]], y_test[rows[1]]
    monkeypatch.setattr(sources, "mnist_subset", lambda: some)
    monkeypatch.setattr(yopo.data, "mnist_subset", lambda: some)
    about, demo = recipes.RECIPES["demo"]
    small = {**demo["model"], "options": {"width": 2, "hidden": 4}}
    monkeypatch.setitem(recipes.RECIPES, "demo", (about, {**demo, "model": small}))


def a_run(_: pytest.MonkeyPatch) -> None:
    """One of pictures."""
    write_network(Path("runs/own"), "fitted")


def on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where its name on the Hub leads (tests/frameworks/test_hub.py goes there)."""
    a_run(monkeypatch)
    asked = {"hf:ORG/NAME": Path("runs/own")}
    monkeypatch.setattr(hub, "local", asked.__getitem__)


def tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a tracker's is not here (tests/frameworks has them): one that is silent."""
    few(monkeypatch)
    silent = SimpleNamespace(**dict.fromkeys(("start", "log", "image", "end"), lambda *_: None))
    monkeypatch.setattr(tracking, "named", lambda _: silent)


def foolbox(_: pytest.MonkeyPatch) -> None:
    """It need not be everywhere."""
    pytest.importorskip("foolbox", reason="needs yopo-torch[dev]")


BEFORE: dict[str, Prepared] = {  # by words of a block; what must be there first
    "import foolbox": foolbox,
    "together=True": a_group,
    "fully_shard(": a_group,
    "exchange_gradients(": a_group,
    "dist.init_process_group(": torchrun,
    "hf:ORG/NAME": on_the_hub,
    'load("runs/own")': a_run,
    "compare_runs(": few,
    "track=": tracked,
}


@pytest.mark.parametrize("page", HERE, ids=lambda page: f"{page[0]} {page[1]}")
def test_a_block_runs_as_it_stands(
    page: Page, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = BLOCKS[page]
    for words, prepared in BEFORE.items():
        if words in block:
            prepared(monkeypatch)
    exec(compile(block, f"{page[0]}, block {page[1]}", "exec"), names)
    if "main" in names:  # of a block that is a program
        names["main"]()


def test_every_block_is_run_somewhere() -> None:
    assert len(HERE) > 12
    assert all(any(words in BLOCKS[page] for page in HERE) for words in BEFORE)
    for page, file in ELSEWHERE.items():
        assert (page, 0) in BLOCKS
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"docs/{page}" in text.partition("\n")[0], "its first line says which page it runs"


def test_pages_to_look_up_are_made_of_the_code() -> None:
    for file, text in look_up.texts().items():
        assert file.read_text(encoding="utf-8") == text, f"{file}: run python -m tools.look_up"


def test_every_extra_is_on_the_page_of_installing() -> None:
    text = (DOCS / "installing.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"(?m)^\| (`.*?) \|", text)
    assert {x for row in rows for x in re.findall(r"`(\w+)`", row)} == {
        *project["optional-dependencies"]
    }
    least = re.findall(r"\d+\.\d+", f"{project['requires-python']} {project['dependencies'][0]}")
    assert "Python {} or later, torch {} or later".format(*least) in text
    for page in SITE:  # it is on no index yet
        assert "pip install 'yopo-torch" not in page.read_text(encoding="utf-8"), page


KINDS = "python bibtex {code-cell} {eval-rst} {include} {literalinclude} {toctree}".split()


@pytest.mark.parametrize("page", [*SITE, ROOT / "README.md"], ids=lambda page: page.name)
def test_no_block_is_overlooked(page: Path) -> None:
    """Neither one within a list, nor Python by another name."""
    text = page.read_text(encoding="utf-8")
    assert text.count("```python") == len(fenced(text, "python"))
    assert {b["kind"].partition(" ")[0] for b in FENCE.finditer(text)} <= {*KINDS, ""}


def test_blocks_within_lists_are_found() -> None:
    indented = "- x:\n\n  ```python\n  a = 1\n    b\n  ```\n"
    assert fenced(indented, "python") == ["a = 1\n  b\n"]
    with pytest.raises(AssertionError, match="none closes"):
        fenced(indented.rstrip("` \n"))


def test_a_block_that_fails_would_be_seen(names: dict[str, Any]) -> None:
    with pytest.raises(AttributeError, match="no attribute 'YOP'"):
        exec("yopo.YOP(model, threat)", names)


# ---------------------------------------------------------------- the page of the API


API = (DOCS / "api.md").read_text(encoding="utf-8")
SHOWN = {
    f"yopo.{name.removeprefix('yopo.')}": kind
    for kind, name in re.findall(
        r"(?:auto|\.\. )(class|exception|function|data|module):: ([\w.]+)", API
    )
}
INSIDE = {"api.md", "code.md", "design.md"}  # of those who work on yopo itself


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the callbacks of packages that are not here, as in docs/conf.py."""
    for name, base in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
        module = ModuleType(name)
        setattr(module, base, object)
        for part in (name, name.partition(".")[0]):
            monkeypatch.setitem(sys.modules, part, module)
    for name in ("lightning", "transformers"):
        monkeypatch.delitem(sys.modules, f"yopo.integrations.{name}", raising=False)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    rooms = {"attacks", "models"}  # of which functions are shown
    assert {f"yopo.{name}" for name in {*yopo.__all__} - rooms} <= {*SHOWN}
    assert {f"yopo.{name}" for name in rooms} <= {name.rpartition(".")[0] for name in SHOWN}
    networks = {name for name in yopo.models.__all__ if name not in yopo.__all__}
    assert {f"yopo.models.{name}" for name in networks} <= {*SHOWN}
    for word in ("__call__", "load_state_dict"):
        assert word in API


def named(text: str) -> set[str]:
    """What a page has of yopo: in its Python, in shell blocks, and in sentences."""
    found = {*re.findall(r"`(yopo(?:\.\w+)+)", prose(text))}
    found |= {name for b in fenced(text) for name in re.findall(r"(?m)^(yopo(?:\.\w+)+)", b)}
    for block in (*fenced(text, "python"), *fenced(text, "{code-cell} ipython3")):
        code = re.sub(r"(?m)^(:tags|!).*$|^%%bash(?s:.*)", "", block)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("yopo"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                found |= {*re.findall(r"^yopo(?:\.\w+)+$", ast.unparse(node))}
    return found


@pytest.mark.parametrize(
    "page", [p for p in (*SITE, ROOT / "README.md") if p.name not in INSIDE], ids=lambda p: p.name
)
def test_names_that_a_page_tells_of_are_on_the_page_of_the_api(page: Path) -> None:
    """Themselves, as a part of what is there, or as the room of something there."""
    for name in named(page.read_text(encoding="utf-8")):
        assert any(f"{name}.".startswith(f"{known}.") for known in SHOWN) or any(
            known.startswith(f"{name}.") for known in SHOWN
        ), name


@pytest.mark.usefixtures("bases")
@pytest.mark.parametrize("name", [n for n, kind in SHOWN.items() if kind in ("class", "function")])
def test_every_parameter_is_told_of(name: str) -> None:
    """In the docstring, or beside the field of a dataclass; as the site has it."""
    room, _, last = name.rpartition(".")
    thing = getattr(import_module(room), last)
    told = "\n".join(as_rst((inspect.getdoc(thing) or "").splitlines(), thing)).replace(r"\_", "_")
    given = inspect.signature(thing).parameters.values()
    names = {p.name for p in given} - {"args", "kwargs"}  # those of a protocol
    assert not [n for n in names if not re.search(rf"(?<!\w){n}(?!\w)", told)]
