"""A claim for RobustBench: what it holds, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_commands import yopo as command
from tests.published import NETWORKS, write_evaluation, write_network
from yopo.core import seals
from yopo.runs.overlay import Tree
from yopo.runs.robustbench import Paper, claim_run, translated
from yopo.runs.saved import find, load_images, load_model

PAPER = Paper(
    name="Doe2026Fast",
    title="Fast and robust",
    authors="Jo Doe",
    venue="arXiv",
    link="https://arxiv.org/abs/0000.00000",
)
CIFAR10 = {"name": "cifar10"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    net = write_network(tmp_path / "run", "wideresnet", data=CIFAR10)
    write_evaluation(tmp_path / "run", net)
    return tmp_path / "run"


def test_a_claim_is_what_the_leaderboard_reads(run: Path, tmp_path: Path) -> None:
    done = claim_run(run, PAPER, tmp_path / "claim")
    there = {f.name for f in done.folder.iterdir()}
    assert there == {"Doe2026Fast.json", "Doe2026Fast.py", "Doe2026Fast.pt", "issue.md"}
    assert json.loads((done.folder / "Doe2026Fast.json").read_text()) == {
        "link": "https://arxiv.org/abs/0000.00000",
        "name": "Fast and robust",
        "authors": "Jo Doe",
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": "cifar10",
        "venue": "arXiv",
        "architecture": "WideResNet-10-1",
        "eps": "8/255",
        "clean_acc": "75.00",
        "reported": "43.75",
        "autoattack_acc": "43.75",
    }
    text = (done.folder / "issue.md").read_text()
    assert "| accuracy under AutoAttack (standard version) | 43.75% |" in text
    assert "The evaluation warned of nothing." in text
    assert "{" not in text.replace('{"model"', "")
    state = torch.load(done.folder / "Doe2026Fast.pt", weights_only=True)
    assert "block1.layer.0.conv1.weight" in state


def about(**over: Any) -> Tree:
    return {"about": over}


@pytest.mark.parametrize(
    ("over", "why"),
    [
        (about(images=1000), "it is of 1,000 images, not of all 10,000"),
        (about(eps=4 / 255), "its eps is 4/255, the Linf board's 8/255"),
        (about(precision="bf16"), "it is in bf16"),
        (about(file_sha256="0" * 64), "there is no evaluation of these weights"),
        ({"attacks": {"autoattack": {"settings": "as in the standard version"}}}, "the whole of"),
        ({"attacks": {"autoattack": None}}, "it has not the whole of AutoAttack"),
    ],
)
def test_only_what_the_leaderboard_takes_is_claimed(run: Path, over: Tree, why: str) -> None:
    values = seals.read_json(run / "eval.json")
    values["about"] |= over.get("about", {})
    for name, changed in over.get("attacks", {}).items():
        if changed is None:
            del values["attacks"][name]
        else:
            values["attacks"][name] |= changed
    seals.write_json(run / "eval.json", values)
    with pytest.raises(ValueError, match="is one that RobustBench takes: ") as refused:
        claim_run(run, PAPER)
    assert why in str(refused.value)
    assert f"Run `yopo eval {run} --attacks clean,autoattack --eps 8/255`" in str(refused.value)
    assert not (run / "robustbench").exists()


@pytest.mark.parametrize("name", ["smallcnn", "resnet50", "fitted"])
def test_a_network_that_is_not_in_its_zoo_is_refused(name: str, tmp_path: Path) -> None:
    net = write_network(tmp_path / "run", name, data=CIFAR10)
    write_evaluation(tmp_path / "run", net)
    with pytest.raises(ValueError, match=f"RobustBench has no {name} as it is here"):
        claim_run(tmp_path / "run", PAPER)


def test_a_narrow_one_is_refused(tmp_path: Path) -> None:
    net = write_network(tmp_path / "run", "preactresnet18", data=CIFAR10)
    write_evaluation(tmp_path / "run", net)
    with pytest.raises(ValueError, match="has 64 filters and four stages; this one has 4 and 4"):
        claim_run(tmp_path / "run", PAPER)


def test_other_data_are_refused(tmp_path: Path) -> None:
    net = write_network(tmp_path / "run", "wideresnet")
    write_evaluation(tmp_path / "run", net)
    with pytest.raises(ValueError, match="this run is on mnist-subset; "):
        claim_run(tmp_path / "run", PAPER)


def test_the_command_writes_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["robustbench", run, "--name", "x y", "--title", "t", "--authors", "a"]
    words += ["--venue", "v", "--link", "l"]
    assert command(monkeypatch, *words) == 2
    assert "expected --name as Zhang2019You, got 'x y'" in capsys.readouterr().err
    words[3] = "A2026B"
    assert command(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert f"wrote A2026B.json, A2026B.pt, A2026B.py, issue.md into {run / 'robustbench'}" in out


def test_only_what_was_written_is_named_and_no_link_is_followed(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "issue.md").write_text("mine")
    (run / "robustbench").symlink_to(mine)
    with pytest.raises(ValueError, match="robustbench is a link, and nothing of a run is written"):
        claim_run(run, PAPER, say=said.append)
    assert [f.name for f in mine.iterdir()] == ["issue.md"]
    assert (mine / "issue.md").read_text() == "mine"
    (run / "robustbench").unlink()
    (run / "robustbench").mkdir()
    (run / "robustbench" / "private.txt").write_text("mine")
    (run / "robustbench" / "Doe2026Fast.pt").symlink_to(mine / "issue.md")
    claim_run(run, PAPER, say=said.append)
    (wrote,) = said
    assert wrote.startswith("wrote Doe2026Fast.json, Doe2026Fast.pt, Doe2026Fast.py, issue.md into")
    assert (mine / "issue.md").read_text() == "mine"


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ["preactresnet18", "wideresnet"])
def test_all_weights_are_translated(name: str, normalize: bool, tmp_path: Path) -> None:
    over: Tree = {"normalize": normalize}
    if name == "preactresnet18":
        over["options"] = {"width": 64, "blocks": [1, 1, 1, 1]}
    write_network(tmp_path / "run", name, over=over)
    saved = find(tmp_path / "run")
    net = load_model(saved, load_images(saved))
    state = translated(net, saved).state
    own = net.state_dict()
    assert NETWORKS[name]
    assert sorted(t.numel() for t in state.values()) == sorted(t.numel() for t in own.values())
    assert ("mean" in state) == normalize
