"""docs/data.md: each of its files, as it stands there, makes the data of a run, on few pictures.

torchvision lies in the folder of timm, and is imported in a process of its own.
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.frameworks.loops import started
from tests.pages import DOCS, fenced, saved

PAGE = (DOCS / "data.md").read_text()
FILES = {block.split("\n", 1)[0]: block for block in fenced(PAGE, "python")}
FOLDER = Path(sys.prefix) / "timm"
NAMES = ("cat", "dog")
CODE = """
import sys
from pathlib import Path

if sys.argv[1] == "my_data":
    from tests.frameworks.test_timm import without_compiled_parts

    library = without_compiled_parts()

from tests.tiny import tiny_config
from yopo.runs.api import train_run

if __name__ == "__main__":
    module, *words = sys.argv[1:]
    data = {"name": f"{module}:build_data", "options": dict(w.split("=") for w in words)}
    data |= {"held_out": 4} if module == "my_data" else {"workers": 0}
    model = {"options": {"width": 2, "size": 224, "hidden": 4}}
    evaluate = {"images": 4, "steps": 1}
    over = {"data": data, "model": model, "evaluate": evaluate, "epochs": 1, "batch": 4}
    result = train_run(tiny_config(over), Path("run"), device="cpu")
    print("tested on", result["test_images"])
"""


def pictures(n: int, sides: tuple[int, int]) -> list[tuple[int, bytes]]:
    """A label and a file each."""
    draw, found = np.random.default_rng(0), []
    for i in range(n):
        file = io.BytesIO()
        pixels = draw.integers(0, 256, (*sides, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "jpeg")
        found.append((i % 2, file.getvalue()))
    return found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Folders of pictures that are not square."""
    for part, n in (("train", 12), ("val", 20)):
        for i, (label, file) in enumerate(pictures(n, (240, 260))):
            folder = tmp_path / "photos" / part / NAMES[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.jpg").write_bytes(file)
    return tmp_path / "photos"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Tar files of pictures of one size."""
    wds = pytest.importorskip("webdataset", reason="needs webdataset")
    folder = tmp_path / "shards"
    folder.mkdir()
    for part, n in (("train-0", 8), ("train-1", 8), ("held-0", 4), ("val-0", 6)):
        with wds.TarWriter(str(folder / f"{part}.tar")) as tar:
            for i, (label, file) in enumerate(pictures(n, (224, 224))):
                tar.write({"__key__": f"{part}-{i}", "jpg": file, "cls": str(label)})
    (folder / "names.txt").write_text("\n".join(NAMES))
    return folder


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, *options: Any) -> str:
    """What a run says that trains on what the file's function makes."""
    saved(FILES[f"# {module}.py"], folder)
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "train_on.py").write_text(CODE)
    done = started([sys.executable, "train_on.py", module, *map(str, options)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_files_of_the_page_are_run() -> None:
    assert list(FILES) == ["# my_data.py", "# my_stream.py", "# my_shards.py"]


@pytest.mark.skipif(not FOLDER.exists(), reason="needs torchvision, as make frameworks has it")
def test_folders_through_torchvision(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tested on 20" in run(tmp_path, monkeypatch, "my_data", f"root={photos}")


def test_a_stream_of_hugging_faces(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="needs datasets")
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    words = (f"name={photos}", "images=12", "workers=1")
    assert "tested on 18" in run(tmp_path, monkeypatch, "my_stream", *words)


def test_shards_of_webdataset(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="needs datasets")
    words = (f"folder={shards}", "images=16", "workers=1")
    assert "tested on 6" in run(tmp_path, monkeypatch, "my_shards", *words)
