"""Help, and what needs no network, answer without torch."""

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
# Recipes and settings are read off the methods' signatures, and `reproduce` has recipes for rows.
WORDS = [
    ["--help"],
    ["--version"],
    ["trian", "demo"],
    *([name, "--help"] for name in cli.COMMANDS if name != "reproduce"),
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_it_loads_no_torch(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr
    assert done.returncode == (2 if words[0] == "trian" else 0)
    assert words[0] != "trian" or "invalid choice: 'trian'" in done.stderr


def test_no_command_makes_up_the_arguments_of_another() -> None:
    for file in Path(cli.__file__).parent.glob("*.py"):
        assert "Namespace(" not in file.read_text(encoding="utf-8"), file


def test_what_trains_does_load_it() -> None:
    """So that the test above would see it."""
    words = ["train", "demo", "--dry-run", "--epochs", "0"]
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded: numpy torch yopo.runs.api"
