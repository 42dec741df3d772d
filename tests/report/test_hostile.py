"""Every word of every file that the report reads is hostile: none becomes an element."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile import (
    EXAMPLES,
    FILES,
    HOSTILE,
    load,
    places,
    put,
    rename,
    save,
    shown,
    spoil,
    write_full_run,
)
from tests.reports import Page

pytestmark = pytest.mark.usefixtures("float32")
FREE = ("data-tip", "alt", "content")  # attributes whose values are words
Shape = tuple[str, tuple[tuple[str, str], ...]]


def shapes(text: str) -> set[Shape]:
    """Elements with their attributes, without the words in them."""
    found, seen = set(), Counter[str]()
    for tag, attrs in Page(text).elements:
        seen[tag] += tag in ("script", "style", "meta", "title")  # one more is another
        words = sorted((k, "" if k in FREE else _value(v)) for k, v in attrs.items())
        found.add((f"{tag} {seen[tag]}", tuple(words)))
    return found


def _value(text: str) -> str:
    if re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", text):
        return "a picture"
    if kind := re.fullmatch(r"data:(text/csv|application/json);base64,[A-Za-z0-9+/=]+", text):
        return f"a file of {kind[1]}"
    text = re.sub(r"\bc\d+\b", "a colour", text)  # a method's, of whatever name
    return "numbers" if re.fullmatch(r"[-\d.e+, ]+", text) else text


def test_no_word_becomes_an_element_or_an_attribute(tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "run")
    clean = shown(folder)
    assert clean is not None
    assert "read as" in clean
    allowed = shapes(clean) | shapes(shown(write_full_run(tmp_path / "b"), folder) or "")
    drawn = dict.fromkeys(FILES, 0)
    refused = 0
    for number, place in enumerate(places(folder)):
        for evil in (HOSTILE[number % len(HOSTILE)], HOSTILE[0]):
            before = load(folder / place[0])
            save(folder / place[0], put(before, place, evil))
            text = shown(folder)
            save(folder / place[0], before)
            if text is None:
                refused += 1
                continue
            new = shapes(text) - allowed
            assert not new, (place, evil)
            drawn[place[0]] += evil in Page(text).text
    assert all(count > 3 for count in drawn.values()), drawn
    assert refused  # of settings that are no longer ones


@pytest.mark.parametrize("evil", HOSTILE)
def test_names_of_folders_and_classes_are_words(evil: str, tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "run")
    allowed = shapes(shown(folder) or "")
    spoil(folder, lambda _: evil)
    folder = rename(folder, evil)
    text = shown(folder)
    assert text is not None
    assert not shapes(text) - allowed
    found = Page(text)
    assert found.text.count(evil) > 40
    assert f"{evil}, adversarial" in {img["alt"] for img in found.all("img")}
    assert (folder / EXAMPLES).exists()


def test_the_walk_can_fail(tmp_path: Path) -> None:
    """A page that does not escape one word has other elements than the clean one."""
    text = shown(write_full_run(tmp_path / "run")) or ""
    for evil in HOSTILE[:3]:
        with pytest.raises(AssertionError):  # Page minds what is not closed
            assert not shapes(text.replace("a warning", f"a {evil}")) - shapes(text)
