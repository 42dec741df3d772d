"""README and docs: short, in whole lines, and all that they name is there and works."""

import pkgutil
import re
import shlex
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader, TensorDataset

import yopo
from tests.conftest import Batch, convnet, grads
from tests.pages import DOCS as FOLDER
from tests.pages import ROOT, SITE, fenced, in_lines, prose
from tests.tiny import PATIENCE
from yopo import cli
from yopo.attacks.names import parse_all
from yopo.cli.eval import someone_elses
from yopo.cli.training import settings_typed
from yopo.engine.engine import Engine
from yopo.runs.api import configure, method_configs
from yopo.runs.settings import validate

README = (ROOT / "README.md").read_text()
DOCS = {page.relative_to(FOLDER).as_posix(): page.read_text() for page in SITE}
PAGES = {"README.md": README} | DOCS
PARTS = {"⅓": Fraction(1, 3), "⅔": Fraction(2, 3)}


# ------------------------------------------------------------------------------- how it reads


def test_the_readme_has_at_most_900_words() -> None:
    assert 400 < len(README.split()) <= 900  # with code, tables, even their marks


def test_the_first_paragraph_is_two_sentences() -> None:
    first = README.split("\n\n")[1]
    assert "adversarial training" in " ".join(first.split())
    assert len(re.findall(r"\.(?:\s|$)", first)) == 2


WRITTEN = [*PAGES, "../CHANGELOG.md"]
WRITTEN += [f"../{page.relative_to(ROOT).as_posix()}" for page in ROOT.glob("records/**/*.md")]


@pytest.mark.parametrize("name", WRITTEN)
def test_lines_are_at_most_120_wide(name: str) -> None:
    text = PAGES.get(name) or (FOLDER / name).read_text()
    assert not [line for line in in_lines(text) if len(line) > 120]


# ----------------------------------------------------------------------------- what it names


FOLDERS = ("benchmarks", "docs", "examples", "records", "src", "tests", "tools")


def there() -> set[str]:
    """Files and folders of the repository, each under all endings of its path."""
    found = [*ROOT.iterdir(), *(p for top in FOLDERS for p in (ROOT / top).rglob("*"))]
    names = [p.relative_to(ROOT).parts for p in found if "__pycache__" not in p.parts]
    return {"/".join(name[i:]) for name in names for i in range(len(name))}


# What a run, an evaluation or a reader's own folder holds: no files of the repository.
THEIRS = re.compile(
    r"(OUT|DIR|runs|photos|train|val|test)/.*|.*state/?|my_module\.py|mine\.py|net\.eval\.json"
    r"|eval-DATE\.json|(model\.)?eval\.(md|json)|tracking\.json|Doe2026Fast\.\w+|issue\.md"
)


@pytest.mark.parametrize("name", [*PAGES, "speed.md of records"])
def test_files_that_a_page_names_are_there(name: str) -> None:
    page = PAGES.get(name) or (ROOT / "records" / "speed.md").read_text()
    named = re.findall(r"`([\w./-]*\w/?)`", page)
    files = [n for n in named if "/" in n or re.search(r"\.(py|md|json|sh|log|svg|png|toml)$", n)]
    ours = there()
    lost = [n for n in files if n.rstrip("/") not in ours and not THEIRS.fullmatch(n)]
    assert not lost
    for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", page):
        where, _, anchor = link.partition("#")
        page_itself = ROOT / name if name == "README.md" else ROOT / "docs" / name
        to = page_itself.parent / where if where else page_itself
        assert to.is_file(), link
        heads = re.findall(r"(?m)^#+ (.*)$", to.read_text()) if anchor else []
        assert not anchor or anchor in {anchor_of(head) for head in heads}, link


@pytest.mark.parametrize("name", DOCS)
def test_pages_of_the_site_are_links(name: str) -> None:
    """Not a file's name, which leads nowhere there."""
    named = re.findall(r"`(?:docs/)?([\w/-]+\.md)[^`]*`", prose(PAGES[name]))
    assert not [page for page in named if page in DOCS]


@pytest.mark.parametrize("name", PAGES)
def test_python_names_of_a_page_are_there(name: str) -> None:
    """`yopo.a.b` in sentences, and the imports of its Python."""
    for path in re.findall(r"`(yopo(?:\.[A-Za-z_]\w*)+)", PAGES[name]):
        assert path in needing_more() or pkgutil.resolve_name(path) is not None
    for block in fenced(PAGES[name], "python"):
        for line in re.findall(r"(?m)^(?:from|import) yopo.*$", block):
            path = re.sub(r"^from (\S+) import (\w+)$", r"\1.\2", line)
            if path not in needing_more():
                exec(line, {})


def needing_more() -> set[str]:
    """What stands in files that import other people's packages."""
    rooms = (ROOT / "src" / "yopo" / "integrations").glob("*.py")
    found = [(f.stem, re.findall(r"(?m)^(?:class|def) (\w+)", f.read_text())) for f in rooms]
    return {f"yopo.integrations.{stem}.{name}" for stem, names in found for name in names}


def anchor_of(head: str) -> str:
    return re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")


# --------------------------------------------------------------------------- what it lets you type


TYPED = re.compile(r"(?m)^(?!#).*?(?<![\w./-])yopo ([^|>&;)#\n]+)")


def commands() -> list[tuple[str, str]]:
    """What follows `yopo` in every shell line of a page, and in the README's sentences."""
    found = [("README.md", words) for words in re.findall(r"`yopo ([^`]+)`", README)]
    for name, page in PAGES.items():
        for block in fenced(page):
            found += [(name, words.strip()) for words in TYPED.findall(block.replace("\\\n", " "))]
    return found


def test_there_are_commands() -> None:
    assert len(commands()) >= 25
    assert ("README.md", "eval runs/first --attacks clean,pgd-20,cw") in commands()


@pytest.mark.parametrize(("name", "line"), commands())
def test_commands_are_parsed(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    if len(words) == 1:  # a command's name, in a sentence
        assert words[0] in cli.COMMANDS
    else:
        check_typed(words, monkeypatch)


def check_typed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows `yopo` in a shell: a command, its options, settings, methods and attacks."""
    monkeypatch.setattr(sys, "argv", ["yopo", *words])
    command, args, rest = cli.parsed()
    if words[0] in ("train", "compare"):
        typed = settings_typed(rest)
        over = {k: v for k, v in typed.items() if k != "methods"}
        if args.recipe:
            configure(args.recipe, {}, over)
            if words[0] == "compare":
                assert method_configs(args.recipe, args.methods.split(","), over)
    elif words[0] == "eval" and not args.runs:  # of someone else's network
        assert validate(someone_elses(args, rest))
    else:
        assert not rest
    if words[0] == "eval":
        assert parse_all(args.attacks)
    assert command.EXAMPLES


TOOLS = ("torchrun", "python", "bash", "accelerate launch", "fabric run")
STARTED = re.compile(
    rf"(?m)^(?:srun |timeout .*?\d |\w+=\w+ )?({'|'.join(TOOLS)}) ([^#\n]+)",
)


def started() -> list[tuple[str, str, str]]:
    """The lines of pages that start a program of ours otherwise: page, with what, the words."""
    blocks = [(name, block) for name, page in PAGES.items() for block in fenced(page)]
    lines = [(name, block.replace("\\\n", " ")) for name, block in blocks]
    return [(name, *found) for name, block in lines for found in STARTED.findall(block)]


def test_there_are_programs_started_otherwise() -> None:
    assert {tool for _, tool, _ in started()} == {*TOOLS}


@pytest.mark.parametrize(("name", "tool", "line"), started())
def test_what_other_programs_start_is_there(name: str, tool: str, line: str) -> None:
    """A module of ours, a file of the repository, or one that a block of the page is."""
    words = shlex.split(line)
    if tool == "torchrun":  # by its own parser
        args = get_args_parser().parse_args(words)
        words = [*["-m"] * args.module, args.training_script]
    if "-m" in words:
        module = words[words.index("-m") + 1].replace(".", "/")
        assert module == "yopo" or (ROOT / f"{module}.py").is_file()
        return
    file = next(word for word in words if re.search(r"\.(py|sh)$", word))
    blocks = fenced(PAGES[name], "python")
    assert (ROOT / file).is_file() or f"# {file}" in [block.split("\n")[0] for block in blocks]


def test_own_pictures_as_the_readme_says(tmp_path: Path) -> None:
    """The line of "Own data", on noise in the folders it names; --dry-run takes real steps."""
    (line,) = [c for n, c in commands() if n == "README.md" and "--data.root photos" in c]
    for kind in ("cat", "dog"):
        folder = tmp_path / "photos" / kind
        folder.mkdir(parents=True)
        for i in range(90):
            x = torch.randint(0, 256, (70, 64, 3), dtype=torch.uint8)
            Image.fromarray(x.numpy()).save(folder / f"{i}.png")
    small = ["--batch", "20", "--data.held_out", "20", "--evaluate.images", "20"]
    words = [
        sys.executable,
        "-m",
        "yopo",
        *shlex.split(line),
        *small,
        "--dry-run",
        "--device",
        "cpu",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "name: folder" in done.stdout
    assert "ms a step" in done.stdout


# ------------------------------------------------------------------------------- what it runs


def test_its_python_runs_as_it_stands(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small network: the five lines, the engine (compiling is tests/engine's), an attack."""
    monkeypatch.setattr(yopo, "Engine", partial(yopo.Engine, compile=False))
    torch.set_default_dtype(torch.float32)
    model, x = convnet().float(), batch[0].float()
    y = model(x).argmax(1)  # all right at first, with margins that attacks soon overcome
    before = [p.detach().clone() for p in model.parameters()]
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    names: dict[str, Any] = {
        "model": model,
        "loader": loader,
        "optimizer": torch.optim.SGD(model.parameters(), 0.01),
    }
    blocks = fenced(README, "python")
    assert len(blocks) == 3
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    exec(compile(blocks[1], "README.md", "exec"), names)
    assert isinstance(names["engine"], Engine)
    exec(compile(blocks[2], "README.md", "exec"), names)
    result: Any = names["result"]
    assert result.worst <= result.accuracy["autoattack"] <= result.accuracy["clean"]
    assert len(blocks[0].split("\n\n")[1].strip().splitlines()) == 5  # the five lines


ROWS = re.findall(r"(?m)^\| ([^|]+) \| `(yopo\.[^`]+)`[^|]*\| (\d)([⅓⅔]) \|$", README) + re.findall(
    r"(?m)^\| ([^|]+) \| `(yopo\.[^`]+)`[^|]*\| (\d)() \|$", README
)


@pytest.mark.parametrize(("case", "call", "whole", "part"), ROWS)
def test_methods_cost_what_the_table_says(
    case: str, call: str, whole: str, part: str, batch: Batch
) -> None:
    names = {"yopo": yopo, "model": convnet(), "threat": yopo.Linf(0.1)}
    out = eval(call, names).backward(*batch)
    assert out.propagations == pytest.approx(float(int(whole) + PARTS.get(part, Fraction(0))))
    model = names["model"]
    assert isinstance(model, nn.Module)
    assert len(grads(model)) == len([*model.parameters()])


@pytest.mark.parametrize("m", [1, 3])
def test_yopo_makes_one_pass_more_than_m(m: int, batch: Batch) -> None:
    """As README, results and the first tutorial have it; with f0 affine no other passes."""
    model, seen = convnet(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    method = yopo.YOPO(model, yopo.Linf(0.1), m=m, n=3)
    method.backward(*batch)  # the first batch also tells what f0 is
    seen.clear()
    out = method.backward(*batch)
    assert len(seen) == m + 1
    assert out.propagations == pytest.approx(m + 2 / 3)
    for name in ("README.md", "results.md", "methods.md"):
        assert re.search(r"makes m \+ 1\b", " ".join(PAGES[name].split()))
    tutorial = " ".join(PAGES["tutorials/first.md"].split())
    assert "YOPO-3-3: for each batch four passes through the whole network" in tutorial


def test_the_table_has_all_its_rows() -> None:
    assert len(ROWS) == 5
    method = configure("cifar10-fast", {}, {}).tree()["method"]
    assert (method["name"], method["m"], method["n"]) == ("yopo", 3, 3)
