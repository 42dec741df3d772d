"""`yopo bench`: literal loops do the passes they claim, figures follow from counted work."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from yopo import cli
from yopo.bench import reading
from yopo.bench.bench import Bench, Timing, bench
from yopo.bench.literal import literal_loop
from yopo.models import SmallCNN, preactresnet18


def test_what_is_read_of_a_file_is_what_is_written() -> None:
    for read, written in ((reading._BenchRow, Timing), (reading._Bench, Bench)):
        assert {*read.model_fields} <= {field.name for field in fields(written)}


@pytest.mark.parametrize(
    ("spec", "first", "rest", "steps"),
    [
        ("natural", 1, 1, 1),
        ("pgd-3", 4, 4, 1),
        ("free-3", 3, 3, 3),
        ("yopo-2-3", 9, 3, 1),
        ("yopo-2-3-before", 8, 2, 1),
        ("trades-3", 8, 8, 1),
        ("trades-yopo-2-3", 11, 5, 1),
    ],
)
@pytest.mark.parametrize("network", ["smallcnn", "resnet"])
def test_literal_loops_make_the_papers_passes(
    network: str, spec: str, first: int, rest: int, steps: int
) -> None:
    """n real first-layer passes for each of m propagations, beside the propagations' own."""
    net: nn.Module
    if network == "smallcnn":
        net, x = SmallCNN(width=4, hidden=8), torch.rand(4, 1, 28, 28)
    else:
        net, x = preactresnet18(width=4, blocks=(1, 1)), torch.rand(4, 3, 16, 16)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    calls = {"first": 0, "last": 0, "step": 0}
    names = ("conv1", "fc3" if network == "smallcnn" else "linear")
    for key, name in zip(("first", "last"), names, strict=True):
        hook = lambda *_, key=key: calls.__setitem__(key, calls[key] + 1)  # noqa: E731
        net.get_submodule(name).register_forward_hook(hook)
    optimizer.register_step_post_hook(lambda *_: calls.__setitem__("step", calls["step"] + 1))
    before = [p.detach().clone() for p in net.parameters()]
    loop = literal_loop(spec, net, optimizer, 0.1, 0.02, "relu1")
    assert loop is not None
    loop(x, torch.arange(4))
    assert calls == {"first": first, "last": rest, "step": steps}
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_methods_without_a_literal_form_have_none() -> None:
    net = SmallCNN(width=2, hidden=4)
    for spec in ("trades", "trades-yopo", "nfgsm", "yopo", "yopo-2-3-last", "pmp"):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        assert literal_loop(spec, net, optimizer, 0.1, 0.02) is None


def test_figures_follow_from_counted_work() -> None:
    torch.set_default_dtype(torch.float32)
    said: list[str] = []
    found = bench(
        "smallcnn",
        ["natural", "pgd-2"],
        batch=8,
        device=torch.device("cpu"),
        precision="float32",
        seconds=0.05,
        options={"width": 2, "hidden": 8},
        say=said.append,
    )
    natural, pgd = found.rows
    # One image through conv1 … fc3, three times the forward pass but for the input's gradient.
    macs = 26**2 * 9 * 2 + 24**2 * 9 * 2 * 2 + 10**2 * 9 * 2 * 4 + 8**2 * 9 * 4 * 4
    macs += 64 * 8 + 8 * 8 + 8 * 10
    flops = 2 * 8 * (3 * macs - 26**2 * 9 * 2)
    assert natural.tflops * natural.step * 1e9 == pytest.approx(flops, rel=1e-6)
    assert natural.natural == 1
    assert pgd.natural == pytest.approx(pgd.step / natural.step)
    assert natural.low <= natural.step <= natural.high
    assert natural.images_per_second == pytest.approx(8000 / natural.step)
    assert pgd.propagations_per_second == pytest.approx(8000 * (1 + 4 / 3) / pgd.step)
    assert natural.share == pytest.approx(natural.tflops / found.product_tflops)
    assert natural.literal is not None
    assert [row.how for row in found.rows] == ["plain", "plain"]
    json.dumps(found.to_json(), allow_nan=False)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)

    def yopo(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["yopo", "bench", *words])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    files = ["--json", str(tmp_path / "b.json"), "--picture", str(tmp_path / "b.png")]
    small = ["--model", "smallcnn", "--width", "2", "--batch", "8", "--methods", "natural"]
    assert yopo(*small, *files, "--device", "cpu") == 0
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["method"] == "natural"
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    assert yopo("--methods", "yopi-5-3") == 2
    assert "did you mean yopo?" in capsys.readouterr().err
    assert yopo("--model", "resnet") == 2
    assert "there are: smallcnn, preactresnet18, wideresnet" in capsys.readouterr().err
    assert yopo("--batch", "2") == 2
    assert "--batch of at least 8" in capsys.readouterr().err
    assert yopo(*small, "--width", "0") == 2
    assert "--width of at least 1" in capsys.readouterr().err
