"""ONNX files of every network, run by onnxruntime."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cli.test_commands import yopo
from tests.cli.test_eval import run
from tests.published import CLASSES, NETWORKS, write_network
from yopo.runs.exporting import export_run, read_words

pytest.importorskip("onnxscript", reason="needs yopo-torch[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs yopo-torch[onnx]")

pytestmark = pytest.mark.usefixtures("float32")
__all__ = ["run"]


def answers(file: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"image": x.numpy()})[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_an_onnx_file_answers_as_the_network_in_batches_of_any_size(
    name: str, tmp_path: Path
) -> None:
    net, shape = write_network(tmp_path / "run", name), NETWORKS[name][1]
    done = export_run(tmp_path / "run", "onnx")
    assert done.difference is not None
    for n in (1, 2, 5):
        x = torch.rand(n, *shape)
        assert torch.allclose(answers(done.path, x), net(x), atol=1e-5)
    words = read_words(done.path)
    assert words == done.words
    assert json.loads(words["class_names"]) == [*CLASSES]


def test_the_file_judges_images_that_the_network_fell_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("export", run, "--to", "onnx", "--check", "60", "--device", "cpu")
    assert yopo(monkeypatch, *words) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "test images: " in x]
    clean, rest = line.split("images: ")[1].split("% right without an attack, ")
    under = rest.split(" under")[0]
    assert line.endswith(
        "the attack made its images on the run's own network "
        f"({under} right there), and the exported file judged them"
    )
    assert 10 < float(under.rstrip("%")) < float(clean)
