"""Help, and what needs no network, answer without torch."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from yopo import cli

CODE = """
import sys
sys.argv = ["yopo", *sys.argv[1:]]
from yopo.__main__ import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "matplotlib", "yopo.runs.api"} & sys.modules.keys()
    print("loaded:", *sorted(heavy))
"""
WORDS = [
    ["--help"],
    ["--version"],
    ["trian", "demo"],
    ["help"],
    ["version"],
    ["recipes"],
    [],
    *([name, "--help"] for name in cli.COMMANDS if name != "reproduce"),  # it has recipes for rows
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_it_loads_no_torch(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr
    wrong = {"trian": "train", "help": "yopo --help", "version": "yopo --version"}
    meant = wrong.get(words[0]) if words else None
    assert done.returncode == (2 if meant else 0)
    assert not meant or f"no command '{words[0]}'; did you mean {meant}?" in done.stderr


def test_help_takes_half_a_second_of_the_processor_at_most() -> None:
    """Its own time, which others do not lengthen; 0.1 s on the machine that it was written on."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "yopo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "train a network" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 0.5


def test_no_command_makes_up_the_arguments_of_another() -> None:
    for file in Path(cli.__file__).parent.glob("*.py"):
        assert "Namespace(" not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["train", "demo", "--method.n", "2", "--epochs", "1"],
            "train demo: YOPO-3-2, L∞ eps 0.3, mnist-subset (6,000 images, 10 classes), "
            "smallcnn (78,778 parameters), ",
        ),
        (
            ["train", "cifar10-fast", "--method.name", "pgd", "--method.steps", "7"],
            "train cifar10-fast: PGD-7, L∞ eps 8/255, cifar10 (50,000 images, 10 classes), "
            "preactresnet18 (11,172,170 parameters), ",
        ),
        (
            ["compare", "demo", "--methods", "natural,pgd-3", "--propagations", "6"],
            "compare demo: natural,pgd-3, L∞ eps 0.3, mnist-subset (6,000 images, 10 classes), "
            "smallcnn (78,778 parameters), ",
        ),
    ],
)
def test_the_first_line_does_not_wait_for_torch(
    words: list[str], shown: str, tmp_path: Path
) -> None:
    code = CODE.replace("import sys", "import sys; sys.modules['torch'] = None", 1)
    command = [sys.executable, "-c", code, *words, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith(shown)
    assert "torch" in done.stderr


PRESSED = """
import signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", ["torch", "torch.nn", "yopo.runs.trainer"])
def test_ctrl_c_while_torch_is_loaded_is_no_traceback(module: str, tmp_path: Path) -> None:
    """Where the import has got so far, however fast that is."""
    code = PRESSED.format(module=module) + CODE
    command = [sys.executable, "-c", code, "train", "demo", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("train demo: YOPO-3-5")
    assert done.stderr.startswith("interrupted")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 130
    assert not (tmp_path / "run").exists()


def test_ctrl_c_before_a_prediction_is_no_traceback() -> None:
    code = PRESSED.format(module="torch") + CODE
    command = [sys.executable, "-c", code, "predict", "run", "picture.jpg"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "interrupted; nothing was begun\n"
    assert done.returncode == 130


def test_what_trains_does_load_it() -> None:
    """So that the test above would see it."""
    words = ["train", "demo", "--dry-run", "--epochs", "0"]
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded: numpy torch yopo.runs.api"
