"""docs/code.md names what is there, and its picture shows what it says."""

import ast
from pathlib import Path

import pytest

import yopo
from tests.test_rooms import ROOMS, imports
from tools.code_picture import PAGE, PICTURE, WAYS, files, picture, rooms, steps

TEXT = PAGE.read_text()
PACKAGE = Path(yopo.__file__).parent


@pytest.mark.parametrize("file", sorted({*files(TEXT)}))
def test_every_file_that_the_page_names_exists(file: str) -> None:
    root = PACKAGE.parents[1] if file.startswith("tests/") else PACKAGE
    assert (root / file).is_file()


def test_every_room_is_in_the_table() -> None:
    assert {*rooms(TEXT), "yopo", "__main__"} == set().union(*ROOMS)


def used(file: str) -> set[str]:
    """The files of ours that one imports, wherever a public name of a room, or of ours, is from."""
    tree, names = ast.parse((PACKAGE / file).read_text()), {*imports(PACKAGE / file)}
    if "yopo" in names:
        names |= {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    homes = {f"yopo.{n}": home for home, all_of in yopo._HOMES.items() for n in all_of.split()}
    for init in PACKAGE.glob("*/__init__.py"):
        for name in imports(init):
            homes[f"yopo.{init.parent.name}.{name.rpartition('.')[2]}"] = name[5:]
    modules = {name.removeprefix("yopo.") for name in names}
    modules |= {homes[name] for name in names if name in homes}
    ends = [*modules, *(name.rpartition(".")[0] for name in modules)]
    return {f"{end.replace('.', '/')}.py" for end in ends}


@pytest.mark.parametrize("way", ["A batch through", "`yopo train", "`yopo eval"])
def test_every_file_of_a_list_is_on_its_way(way: str) -> None:
    """It imports another file of the list, or is imported by one."""
    text = "".join(s for s in TEXT.split("\n## ") if s.startswith(way))
    listed = {*files(text)}
    imported = {file: used(file) & listed - {file} for file in listed}
    alone = [f for f in listed if not imported[f] and not any(f in i for i in imported.values())]
    assert alone == []
    assert not used("cli/train.py") & {"attacks/cw.py", "report/page.py"}  # it would be seen


def test_the_picture_shows_the_steps_of_the_lists() -> None:
    assert len(files(TEXT)) > 40
    assert all(len(steps(TEXT, way)) > 1 for way in WAYS)
    assert PICTURE.read_text() == picture(TEXT)
    for row in ROOMS:  # half a row has room for so many letters
        assert len(row) == 1 or all(len(rooms(TEXT).get(room, "")) < 56 for room in row)
