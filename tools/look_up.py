"""Write the tables of docs/commands.md and docs/recipes.md, from the parsers and the recipes.

`python -m tools.look_up` writes what stands between their marks; tests/test_pages.py makes it
again, and compares.
"""

import argparse
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tools.reproduction_page import put
from yopo.cli import COMMANDS
from yopo.cli.recipes import listed

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {  # where more stands
    "train": "training.md",
    "compare": "which-method.md",
    "eval": "evaluation.md",
    "predict": "training.md#your-own-data-and-networks",
    "export": "publishing.md#a-file-that-runs-without-yopo",
    "push": "publishing.md#the-hugging-face-hub",
    "robustbench": "publishing.md#robustbench",
    "report": "report.md",
    "diagnose": "diagnose.md",
    "bench": "speed.md",
    "reproduce": "reproduction.md",
    "recipes": "recipes.md",
    "ls": "training.md#a-run-folder",
    "data": "data.md",
    "completion": "installing.md#a-shell-that-completes",
}


def texts() -> dict[Path, str]:
    """What each page should hold; its prose stays as it is."""
    made = {"commands": _commands(), "recipes": _recipes()}
    files = {name: DOCS / f"{name}.md" for name in made}
    return {
        file: put(file.read_text(encoding="utf-8"), name, "\n".join(made[name]))
        for name, file in files.items()
    }


def _commands() -> Iterator[str]:
    """A name, what it does, an example, the names of its options."""
    for name, about in COMMANDS.items():
        module, parser = import_module(f"yopo.cli.{name}"), argparse.ArgumentParser(add_help=False)
        module.options(parser)
        typed = re.sub(r" *\\\n *", " ", module.EXAMPLES)
        example = re.search(rf"(?m)^ *(yopo {name}\b.*?)(?: {{2,}}.*)?$", typed)
        assert example, name
        lines = textwrap.wrap(example[1], 116, break_on_hyphens=False, subsequent_indent="    ")
        yield f"## {name}\n\n{about[0].upper()}{about[1:]}: [more]({PAGES[name]}).\n"
        yield "```\n{}\n```\n".format(" \\\n".join(lines))
        options = [f"`{a.option_strings[-1]}`" for a in parser._actions if a.option_strings]
        options = [option for option in options if "SECTION" not in option]
        if options:
            yield textwrap.fill(", ".join(options), 120, break_on_hyphens=False) + "\n"


def _recipes() -> Iterator[str]:
    """The rows of a table."""
    yield "| recipe | network | training | clean | PGD, CW | AutoAttack |"
    yield "|---|---|---|---|---|---|"
    for about, rows in listed():
        yield f"| *{about}* | | | | | |"
        for name, *cells in rows:
            plain = (cell.strip().replace("*", r"\*") for cell in cells)
            yield f"| `{name}` | {' | '.join(plain)} |"


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
        print(path.name)
