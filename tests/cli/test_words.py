"""On a terminal of 80 columns no line breaks inside a word, and commands can be copied."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.reports import write_run
from yopo import cli
from yopo.cli import diagnose
from yopo.cli.common import Terminal, wrapped
from yopo.report.headline import headline
from yopo.report.records import read_runs


def in_file(words: list[str], folder: Path) -> list[str]:
    """The lines that a command writes where there is room for all of them."""
    command, env = [sys.executable, "-m", "yopo", *words], os.environ | {"COLUMNS": "1000"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=True)
    return done.stdout.splitlines()


def on_terminal(words: list[str], folder: Path, columns: int = 80) -> list[str]:
    """The lines that a command writes to a terminal, which would break what is too long itself."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    free = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "yopo", *words]
    env = free | {"TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=env
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    process.wait()
    return written.decode().splitlines()


def test_sentences_of_a_report(tmp_path: Path) -> None:
    for name, method in {"natural": "natural", "pgd-3": "pgd", "yopo-2-2": "yopo"}.items():
        write_run(tmp_path / name, {"method": {"name": method}})
    shown = on_terminal(["report", "natural", "pgd-3", "yopo-2-2"], tmp_path)
    assert max(map(len, shown)) <= 80
    told = headline(read_runs([tmp_path / name for name in ("natural", "pgd-3", "yopo-2-2")]))
    assert max(map(len, told)) > 160
    assert all(f"- {sentence}" in " ".join(" ".join(shown).split()) for sentence in told)


def test_errors(tmp_path: Path) -> None:
    shown = on_terminal(["train", "demoo", "--out", "run"], tmp_path)
    assert len(shown) > 1
    assert max(map(len, shown)) <= 80
    assert " ".join(shown).endswith("`yopo recipes` lists them, and settings come after the recipe")


@pytest.mark.parametrize("command", [*cli.COMMANDS, ""])
def test_help(command: str, tmp_path: Path) -> None:
    """The same words as in a file; a command that goes on does so with a backslash."""
    words = [command, "--help"] if command else ["--help"]
    shown, wide = on_terminal(words, tmp_path), in_file(words, tmp_path)
    assert max(map(len, shown)) <= 80
    whole = "\n".join(shown).replace(" \\\n      ", " ")
    assert whole.split() == " ".join(wide).split()
    commands = [line for line in wide if re.match(r"  \S*(yopo|torchrun) ", line)]
    lines = whole.splitlines()
    assert all(line in lines or line.split("   ")[0] in lines for line in commands)
    assert bool(commands) == bool(command)


@pytest.mark.parametrize("words", ["recipes", "train --settings"])
def test_lists(words: str, tmp_path: Path) -> None:
    shown, wide = (show(words.split(), tmp_path) for show in (on_terminal, in_file))
    assert max(map(len, shown)) <= 80
    assert set(" ".join(shown).split()) == set(" ".join(wide).split())


def test_commands_stay_whole() -> None:
    command = "yopo train demo --out runs/of/a/long/name --resume"
    text = f"The weights are gone; `{command}`, or pip install 'yopo-torch[cli]', brings them."
    lines = list(wrapped(text, 40))
    assert lines == [
        "The weights are gone;",
        f"`{command}`,",
        "or pip install 'yopo-torch[cli]', brings",
        "them.",
    ]
    assert list(wrapped("- one two\n  three", 6)) == ["- one", "  two", "  three"]


def test_names_of_modules_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drift = {"stops": None} | {key: [0.5] * 6 for key in ("cosine", "gain", "gap")}
    names = [f"features.{i}.block.{j}.convolution.0" for i in (1, 2) for j in (1, 2)]
    depths: list[Any] = [
        {"name": name, "affine": False, "inner_cost": 0.1, "drift": drift} for name in names
    ]
    study = {"depths": depths, "m": 3, "n": 2, "first_layer": names[-1], "because": []}
    monkeypatch.setenv("COLUMNS", "80")
    diagnose.show(study)
    shown = capsys.readouterr().out
    *table, recommended = shown.splitlines()
    assert max(map(len, table)) <= 80
    cells = [line.split()[1] for line in table if line.startswith("│")]
    assert cells == [f"features.{i}…k.{j}.convolution.0" for i in (1, 2) for j in (1, 2)]
    assert recommended.endswith(f"--method.first_layer {names[-1]}")  # to be copied


def test_a_terminal_says_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    Terminal(force_terminal=True).say("four words of sentences")
    Terminal().say("four words of sentences")
    assert capsys.readouterr().out == "four words of\nsentences\nfour words of sentences\n"
