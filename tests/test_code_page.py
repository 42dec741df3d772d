"""docs/code.md names what is there, and its picture shows what it says."""

from pathlib import Path

import pytest

import yopo
from tests.test_rooms import ROOMS
from tools.code_picture import PAGE, PICTURE, WAYS, files, picture, rooms, steps

TEXT = PAGE.read_text()
PACKAGE = Path(yopo.__file__).parent


@pytest.mark.parametrize("file", sorted({*files(TEXT)}))
def test_every_file_that_the_page_names_exists(file: str) -> None:
    root = PACKAGE.parents[1] if file.startswith("tests/") else PACKAGE
    assert (root / file).is_file()


def test_every_room_is_in_the_table() -> None:
    assert {*rooms(TEXT), "yopo", "__main__"} == set().union(*ROOMS)


def test_the_picture_shows_the_steps_of_the_lists() -> None:
    assert len(files(TEXT)) > 40
    assert all(len(steps(TEXT, way)) > 1 for way in WAYS)
    assert PICTURE.read_text() == picture(TEXT)
    for row in ROOMS:  # half a row has room for so many letters
        assert len(row) == 1 or all(len(rooms(TEXT).get(room, "")) < 56 for room in row)
