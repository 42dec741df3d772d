"""What `yopo export` writes answers as the network does, without us."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cli.test_commands import yopo
from tests.cli.test_eval import run
from tests.published import CLASSES, NETWORKS, write_evaluation, write_network
from yopo.core import seals
from yopo.core.threat import Linf
from yopo.runs import exporting, saved
from yopo.runs.exporting import compare, export_run, judged, read_words

pytestmark = pytest.mark.usefixtures("float32")
__all__ = ["run"]

# As a stranger has it: torch alone.
ALONE = """
import sys, torch
sys.modules["yopo"] = None
module = torch.export.load(sys.argv[1]).module()
torch.save([module(x) for x in torch.load(sys.argv[2])], sys.argv[3])
"""


@pytest.mark.parametrize("name", NETWORKS)
def test_a_pt2_file_answers_as_the_network_in_batches_of_any_size(
    name: str, tmp_path: Path
) -> None:
    net, shape = write_network(tmp_path / "run", name), NETWORKS[name][1]
    done = export_run(tmp_path / "run", "pt2")
    assert done.path == tmp_path / "run" / "model.pt2"
    assert done.difference is not None
    assert done.difference < 1e-5
    batches = [torch.rand(n, *shape) for n in (1, 2, 5)]
    module = torch.export.load(done.path).module()
    for x in batches:
        assert torch.allclose(module(x), net(x), atol=1e-5)
    words = read_words(done.path)
    assert words == done.words
    assert json.loads(words["class_names"]) == [*CLASSES]
    assert json.loads(words["image_shape"]) == [*shape]
    assert json.loads(words["threat"]) == {"name": "linf", "eps": 8 / 255}
    assert words["accuracy_from"] == "not measured"


def test_it_needs_nothing_but_torch(tmp_path: Path) -> None:
    net = write_network(tmp_path / "run", "preactresnet18")
    write_evaluation(tmp_path / "run", net)
    done = export_run(tmp_path / "run", "pt2", tmp_path / "sub" / "net.pt2")
    x = torch.rand(3, 3, 32, 32)
    torch.save([x], tmp_path / "x")
    words = [sys.executable, "-c", ALONE, str(done.path), str(tmp_path / "x"), str(tmp_path / "y")]
    subprocess.run(words, check=True, capture_output=True)
    (y,) = torch.load(tmp_path / "y")
    assert torch.allclose(y, net(x), atol=1e-5)
    accuracy = json.loads(done.words["accuracy"])
    assert accuracy == {"clean": 0.75, "pgd-20": 0.5, "autoattack": 0.4375, "worst": 0.4375}
    assert done.words["accuracy_from"] == "eval.json, 10000 images"


@pytest.mark.parametrize("eps", [8 / 255, 1 / 255])
def test_accuracies_stand_beside_the_radius_that_they_are_of(eps: float, tmp_path: Path) -> None:
    net = write_network(tmp_path / "run", "smallcnn")
    write_evaluation(tmp_path / "run", net, {"eps": eps})
    words = export_run(tmp_path / "run", "pt2").words
    assert json.loads(words["accuracy_under"]) == {"name": "linf", "eps": eps}
    assert json.loads(words["threat"]) == {"name": "linf", "eps": 8 / 255}


def test_accuracies_of_other_weights_are_left_out(tmp_path: Path) -> None:
    net = write_network(tmp_path / "run", "smallcnn")
    write_evaluation(tmp_path / "run", net, {"file_sha256": "0" * 64})
    done = export_run(tmp_path / "run", "pt2")
    assert json.loads(done.words["accuracy"]) == {}


def test_the_command_measures_what_eval_measures(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trained network: the attack finds about as much as `yopo eval` does."""
    words = ("export", run, "--to", "pt2")
    assert yopo(monkeypatch, *words, "--check", "100", "--device", "cpu") == 0
    said = capsys.readouterr().out
    found = {}
    for line in said.splitlines():
        if "test images: " in line:
            clean, under = line.split("images: ")[1].split("% right without an attack, ")
            found = {"clean": float(clean), "pgd": float(under.split("%")[0])}
            assert line.endswith("PGD-20 (L∞, eps = 0.1), which attacked the exported file itself")
    assert 15 < found["pgd"] < found["clean"] - 10
    assert "no logit differs by more than" in said
    before = (run / "model.pt2").read_bytes()
    assert yopo(monkeypatch, *words) == 2
    assert "is there already; add --overwrite" in capsys.readouterr().err
    assert (run / "model.pt2").read_bytes() == before
    assert yopo(monkeypatch, *words, "--overwrite", "--check", "-1") == 2
    assert "--check of at least 1" in capsys.readouterr().err


def test_images_are_made_on_the_network_and_judged_by_the_file() -> None:
    """The file here answers "dog" whatever it sees, and so the attack on the network is no help."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.rand(20, 3, 2, 2), torch.ones(20, dtype=torch.long)

    def dog(x: Tensor) -> Tensor:
        return torch.tensor([0.0, 1.0, 0.0]).expand(len(x), 3)

    told = judged(dog, net, x, y, Linf(0.9), 0)
    assert "20 test images: 100.0% right without an attack, 100.0% under PGD-20" in told
    assert told.endswith(
        "on the run's own network (0.0% right there), and the exported file judged them"
    )


class Fickle(nn.Module):
    """Its branch depends on what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if out.sum() > 0 else -out


def test_a_network_that_cannot_be_exported_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_network(tmp_path / "run", "smallcnn")
    monkeypatch.setattr(exporting, "load_model", lambda *_: Fickle().eval())
    with pytest.raises(ValueError, match=r"^this network cannot be exported to pt2: .*one graph"):
        export_run(tmp_path / "run", "pt2")
    assert [p.name for p in (tmp_path / "run").iterdir() if "pt2" in p.name] == []


def test_a_file_that_answers_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ValueError, match=r"differs by .*not kept"):
        compare(lambda x: net(x) + 0.1, net, torch.Size((3, 2, 2)), "pt2")
    with pytest.raises(ValueError, match="differs by nan"):
        compare(lambda x: net(x) * torch.nan, net, torch.Size((3, 2, 2)), "pt2")
    assert compare(lambda x: net(x) + 1e-5, net, torch.Size((3, 2, 2)), "pt2") > 0

    def one(x: Tensor) -> Tensor:
        assert len(x) == 1, "a batch of one"
        return torch.as_tensor(net(x))

    with pytest.raises(ValueError, match="does not take 2 images: a batch of one"):
        compare(one, net, torch.Size((3, 2, 2)), "onnx")


def test_what_is_lacking_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_network(tmp_path / "run", "smallcnn")
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    for check in (0, 5):
        with pytest.raises(ValueError, match=r"needs onnx.*: pip install 'yopo-torch\[onnx\]'"):
            export_run(tmp_path / "run", "onnx", check=check)
    with pytest.raises(ValueError, match="expected --to onnx or pt2, got 'tflite'"):
        export_run(tmp_path / "run", "tflite")


def test_nothing_is_claimed_of_an_attack_that_was_not_made(tmp_path: Path) -> None:
    """A look at the clean images has no worst case, and does not hide an evaluation that has."""
    run = tmp_path / "run"
    values = write_evaluation(run, write_network(run, "preactresnet18"))
    assert told(run)["worst"] == 0.4375
    clean = values | {"attacks": {"clean": values["attacks"]["clean"]}}
    clean = {k: v for k, v in clean.items() if k != seals.KEY}
    seals.write_json(run / "model.eval.json", clean)  # the newest
    assert told(run)["worst"] == 0.4375
    (run / "eval.json").unlink()
    assert told(run) == {"clean": 0.75}


def told(run: Path) -> Any:
    there = saved.find(run)
    return json.loads(exporting.about(run, there, saved.load_images(there))["accuracy"])
