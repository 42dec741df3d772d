"""The library speaks through the logger `yopo`, the command line alone prints."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import yopo
from tests.conftest import Batch, convnet
from yopo.cli import Said

PACKAGE = Path(yopo.__file__).parent


def test_only_the_command_line_prints() -> None:
    """Nor writes to the standard streams, nor has `print` for a default."""
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name == "cli" or file.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name | ast.Attribute):
                prints = ast.unparse(node) in ("print", "pprint", "sys.stdout", "sys.stderr")
                assert not prints, f"{file.relative_to(PACKAGE)}:{node.lineno}"


def test_all_loggers_are_below_yopo() -> None:
    """`auto-attack` is the other package's, which is held back."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                assert ast.unparse(node.args[0]) in ("__name__", "'yopo'", "'auto-attack'")


def test_it_is_silent_until_somebody_listens() -> None:
    code = (
        "import logging, yopo; logging.getLogger('yopo.engine.engine').warning('unheard'); "
        "logging.basicConfig(); logging.getLogger('yopo.engine.engine').warning('heard')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "unheard" not in done.stderr
    assert "heard" in done.stderr


def test_what_the_engine_could_not_make_fast_is_a_warning(
    batch: Batch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    net = convnet()
    method = yopo.PMP(net, yopo.Linf(0.1), m=1)
    yopo.Engine(method, torch.optim.SGD(net.parameters(), 0.1)).step(*batch)
    (line,) = caplog.records
    assert line.name == "yopo.engine.engine"
    assert line.levelno == logging.WARNING
    assert "PMP runs the network layer by layer" in line.getMessage()
    assert capsys.readouterr() == ("", "")


def test_the_command_line_says_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("yopo.of.a.test")
    said = Said(logging.WARNING)
    logger.addHandler(said)
    logger.warning("a disk \x1b[31mis full")
    logger.info("not this")
    logger.removeHandler(said)
    out, err = capsys.readouterr()
    assert out == ""
    assert "yopo: a disk" in err
    assert "\x1b" not in err
    assert "not this" not in err
