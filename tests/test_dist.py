"""What a package's page shows: the README, whose links lead from anywhere to what is here."""

import re
import tomllib
from pathlib import Path

from tools.dist import relative_links

ROOT = Path(__file__).parents[1]
HOME = "https://github.com/yopo-torch/yopo-torch/blob/main/"
RAW = "https://raw.githubusercontent.com/yopo-torch/yopo-torch/main/"


def page() -> str:
    """The README after what the build does to it."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"][
        "hooks"
    ]
    text = (ROOT / "README.md").read_text()
    for change in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_every_link_of_the_packages_page_leads_to_a_file_that_is_here() -> None:
    before, after = (ROOT / "README.md").read_text(), page()
    assert len(relative_links(before)) > 15
    assert relative_links(after) == []
    links = [to for to in re.findall(r"\]\(([^)]+)\)", after) if to.startswith((HOME, RAW))]
    assert len(links) == len(relative_links(before))
    for link in links:
        path = link.removeprefix(HOME).removeprefix(RAW).partition("#")[0].partition("?")[0]
        assert (ROOT / path).is_file(), link


def test_pictures_are_shown_and_not_linked_to() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page())
    assert pictures
    assert all(to.startswith(RAW) and to.endswith(".svg?sanitize=true") for to in pictures)
