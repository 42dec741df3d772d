"""`yopo`, `yopo ls` and `yopo completion`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.test_commands import yopo
from yopo import cli
from yopo.cli.completion import vocabulary
from yopo.runs.recipes import RECIPES

RUN = Path(__file__).parents[2] / "records/reproduction/table2/yopo-3-5-seed-0"


def test_yopo_alone_says_what_to_do_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yopo(monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "yopo train demo --out runs/first" in shown
    assert all(name in shown for name in cli.COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80


def test_recipes_say_where_to_begin_and_what_to_expect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yopo(monkeypatch, "recipes") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Start with the demo: yopo train demo")
    (line,) = [x for x in shown.splitlines() if x.startswith("  cifar10-pgd-10 ")]
    assert line.split() == [
        "cifar10-pgd-10",
        "preactresnet18",
        "7.4",
        "min",
        "84.5%",
        "44.7%",
        "43.6%",
    ]
    assert "NVIDIA H200" in shown
    rows = [x for x in shown.splitlines() if x.startswith("  ")]
    assert max(map(len, rows)) <= 80


def test_runs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert yopo(monkeypatch, "ls") == 2
    assert "yopo: no folder runs; `yopo train RECIPE --out DIR`" in capsys.readouterr().err
    for name in ("done", "several/going", "several/bad"):
        shutil.copytree(RUN, tmp_path / "runs" / name)
    (tmp_path / "runs/several/going/result.json").unlink()
    (tmp_path / "runs/several/bad/result.json").write_text("{")
    lines = (RUN / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "runs/several/going/metrics.jsonl").write_text("\n".join(lines[:10]) + "\n")
    assert yopo(monkeypatch, "ls") == 0
    heads, done, bad, going = [x.split() for x in capsys.readouterr().out.splitlines()]
    assert heads == ["method", "state", "clean", "/", "PGD", "age", "run"]
    best = json.loads((RUN / "result.json").read_text())["best"]
    shares = [f"{best['clean']:.1%}", "/", f"{best['pgd-20']:.1%}"]
    assert done[:5] == ["YOPO-3-5", "finished", *shares]
    assert done[-1] == "runs/done"
    line = json.loads(lines[9])
    assert going[:5] == ["YOPO-3-5", "epoch", "10", "of", "40"]
    assert going[5:8] == [f"{line['clean']:.1%}", "/", f"{line['robust']:.1%}"]
    assert bad[:3] == ["–", "damaged", "–"]


@pytest.mark.parametrize(
    ("actions", "state"),
    [
        (["stop"], "collapsed in epoch 1 "),
        (["rollback"] * 3, "collapsed in epoch 1 "),
        (["rollback"] * 2, "epoch 1 of 40 "),
        (["ignore"] * 3, "epoch 1 of 40 "),
        (["rollback"] * 2 + [None], "epoch 1 of 40 "),
    ],
)
def test_a_run_that_collapsed_is_not_called_underway(
    actions: list[str | None],
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    (run / "result.json").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"guard": {"most": 2}}))
    fell = [{"collapse": "NaN", "action": action} if action else {} for action in actions]
    (run / "metrics.jsonl").write_text("".join(json.dumps({"epoch": 1} | x) + "\n" for x in fell))
    assert yopo(monkeypatch, "ls", run) == 0
    assert state in capsys.readouterr().out


@pytest.fixture(scope="module")
def script() -> str:
    command = [sys.executable, "-m", "yopo", "completion", "bash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("without", ["clean", "robust"])
def test_a_line_that_lacks_an_accuracy_is_passed_over(
    without: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    (run / "result.json").unlink()
    first: dict[str, float | None] = {"epoch": 1, "clean": 0.5, "robust": 0.25}
    looks = [first, {"epoch": 2, "clean": 0.7, "robust": 0.6, without: None}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    assert yopo(monkeypatch, "ls", run) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[1:8] == ["epoch", "2", "of", "40", "50.0%", "/", "25.0%"]


@pytest.mark.parametrize(
    ("typed", "last", "others"),
    [
        ("com", "compare", ["completion"]),
        ("train cifar10-y", "cifar10-yopo-3-5", ["cifar10-yopo-5-3"]),
        ("eval --att", "--attacks", []),
        ("completion z", "zsh", []),
        ("train demo --epo", "--epochs", []),
        ("compare demo --method.m", "--method.m", []),
        ("eval runs/first --epo", "", []),
    ],
)
def test_bash_completes(
    typed: str, last: str, others: list[str], script: str, tmp_path: Path
) -> None:
    code = f"""{script}
COMP_WORDS=(yopo {typed}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _yopo
printf '%s\\n' "${{COMPREPLY[@]}}" """
    bash = [shutil.which("bash") or "bash", "-c", code]
    done = subprocess.run(bash, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [last, *others]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_words(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yopo(monkeypatch, "completion", shell) == 0
    shown = capsys.readouterr().out
    for name, words in vocabulary().items():
        assert f" {name}" in shown
        assert " ".join(words) in shown
    assert {*RECIPES, "--resume", "--epochs", "--method.m"} <= {*vocabulary()["train"]}
    assert not any("SECTION" in word for words in vocabulary().values() for word in words)


@pytest.mark.parametrize("words", [["recipes"], ["train", "--help"], []], ids=" ".join)
def test_nobody_reads_on(words: list[str]) -> None:
    """As of `yopo recipes | head -1`, whose other end is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "yopo", *words], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.stderr == ""


def test_settings_stand_under_their_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert yopo(monkeypatch, "train", "--settings") == 0
    groups = dict(part.split("\n", 1) for part in capsys.readouterr().out.strip().split("\n\n"))
    of_yopo = [x.split()[:2] for x in groups["method yopo"].splitlines()]
    assert of_yopo[:2] == [["--method.m", "5"], ["--method.n", "3"]]
    assert "(yopo)" not in groups["method yopo"]
    assert groups["threat linf"].split()[:2] == ["--threat.eps", "8/255"]
    assert groups["threat l2"].split()[:2] == ["--threat.eps", "0.5"]
    assert "--epochs" in groups["the run"]
