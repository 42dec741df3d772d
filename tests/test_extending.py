"""docs/extending.md: its Python is run as it stands there, and does what the page says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import yopo
from tests.conftest import Batch, convnet, grads
from tests.robust import trained
from yopo.methods import registry
from yopo.report.records import read_runs
from yopo.runs.recipes import method_tree
from yopo.runs.settings import fields, validate

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
COMMANDS = re.findall(r"^python mine.py .*", PAGE.read_text(), re.MULTILINE)


def names_of(block: str) -> dict[str, Any]:
    """What a block of the page defines."""
    found: dict[str, Any] = {"__name__": "mine"}
    exec(compile(block, str(PAGE), "exec"), found)
    return found


@pytest.fixture
def mixed() -> Iterator[Any]:
    """The page's method, registered for one test."""
    before = dict(registry.ENTRIES)
    yield names_of(BLOCKS[0])["Mixed"]
    registry.ENTRIES.clear()
    registry.ENTRIES.update(before)


def test_each_piece_is_under_30_lines() -> None:
    assert len(BLOCKS) == 3
    for block in BLOCKS:
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) < 30


def test_the_method_does_what_it_says(mixed: Any, batch: Batch) -> None:
    x, y = batch
    model, threat = convnet(), yopo.Linf(0.1, 0.05)
    eta = threat.start(x)
    out = mixed(model, threat, k=2, clean=0.25).backward(x, y, eta)
    found = grads(model)
    for _ in range(2):
        at = (x + eta).requires_grad_()
        (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(at), y), at)
        eta = threat.ascend(eta, grad, x)
    model.zero_grad()
    loss = 0.25 * nn.functional.cross_entropy(model(x), y)
    loss = loss + 0.75 * nn.functional.cross_entropy(model(x + eta), y)
    loss.backward()
    torch.testing.assert_close(found, grads(model))
    assert torch.equal(out.eta, eta)
    torch.testing.assert_close(out.loss, loss.detach())
    assert out.propagations == pytest.approx(2 * 2 / 3 + 2)


def test_the_engine_takes_it(mixed: Any, batch: Batch) -> None:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    yopo.Engine(mixed(model, yopo.Linf(0.1)), optimizer, compile=False).step(*batch)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_its_settings_are_those_of_its_signature(mixed: Any) -> None:
    assert [row for row in fields() if "(mixed)" in row[2]] == [
        ("method.k", "3", "(mixed) steps of the adversary"),
        ("method.clean", "0.5", "(mixed)"),
    ]
    assert method_tree("mixed-4") == {"name": "mixed", "k": 4}
    tree = validate({"method": {"name": "mixed", "k": "4", "clean": "1/4"}}).tree()
    assert tree["method"] == {"name": "mixed", "k": 4, "clean": 0.25}
    with pytest.raises(ValueError, match=r"method\.k: .*greater than or equal to 1, got '0'"):
        validate({"method": {"name": "mixed", "k": "0"}})
    with pytest.raises(ValueError, match="mixed-3"):
        method_tree("mixt-3")


def test_its_file_is_a_command_line_that_knows_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[0])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    train = next(line for line in COMMANDS if " train " in line).split()[1:]
    small = ["--epochs", "1", "--eps_warmup", "0", "--schedule.warmup", "0"]
    small += ["--model.options.width", "2", "--evaluate.images", "20", "--evaluate.steps", "1"]
    done = run(*train, *small, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    out = tmp_path / train[train.index("--out") + 1]
    (found,) = read_runs([out])
    assert found.config["method"] == {"name": "mixed", "k": 3, "clean": 0.5}
    assert found.spent("propagations") == pytest.approx(3 * 2 / 3 + 2)
    evaluate = next(line for line in COMMANDS if " eval " in line).split()[1:]
    done = run(*evaluate, "--samples", "20", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    done = run("-m", "yopo", *evaluate[1:], "--samples", "20", "--device", "cpu")
    assert done.returncode == 2  # a file names no code
    assert "no method 'mixed'" in done.stderr
    done = run("-m", "yopo", "report", str(out), "--out", "page.html")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["pgd", "free", "fast", "trades", "yopo", "trades-yopo"])
def test_methods_take_the_threat(name: str, batch: Batch) -> None:
    threat: yopo.Threat = names_of(BLOCKS[1])["Lighter"](0.2, 0.05)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    entry = registry.ENTRIES[name]
    loss = nn.functional.cross_entropy
    out = entry.build(model, {}, threat=threat, optimizer=optimizer, loss=loss).backward(*batch)
    assert 0 <= out.eta.min() <= out.eta.max() <= 0.2
    assert out.eta.max() > 0.1
    assert len(grads(model)) == len([*model.parameters()])


def test_methods_that_need_a_known_ball_say_so(batch: Batch) -> None:
    threat = names_of(BLOCKS[1])["Lighter"](0.2, 0.05)
    with pytest.raises(TypeError, match=r"expected yopo\.Linf or yopo\.L2, got Lighter"):
        yopo.NFGSM(convnet(), threat)
    with pytest.raises((TypeError, ValueError), match=r"expected yopo\.Linf.*got Lighter"):
        yopo.PMP(convnet(), threat, adversary="exact").backward(*batch)
    with pytest.raises((TypeError, ValueError), match=r"expected yopo\.Linf.*got Lighter"):
        yopo.PMP(convnet(), threat, adversary="lbfgs").backward(*batch)
    assert yopo.PMP(convnet(), threat, adversary="gradient").backward(*batch).eta.min() >= 0
    with pytest.raises(ValueError, match="AutoAttack knows"):
        yopo.evaluate(convnet(), batch, threat, ["autoattack"])


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = trained()
    return model, x[:60], y[:60]


def test_evaluations_take_the_threat(
    digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, y = digits
    threat = names_of(BLOCKS[1])["Lighter"](0.3, 0.05)
    result = yopo.evaluate(
        model, (x, y), threat, ["pgd-20", "cw"], examples=True, state=tmp_path / "state"
    )
    assert result.accuracy["pgd-20"] < result.accuracy["clean"]
    assert "Lighter, eps = 0.3" in result.card()
    outcome = result.outcomes["pgd-20"]
    assert outcome.images is not None
    eta = outcome.images - x[outcome.index]
    assert -1e-6 <= eta.min() <= eta.max() <= 0.3 + 1e-6


def test_evaluations_take_the_attack(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = digits
    fgsm, threat = names_of(BLOCKS[2])["fgsm"], yopo.Linf(0.2)
    result = yopo.evaluate(model, (x, y), threat, ["clean", "pgd-20", fgsm], batch=17)
    right = model(x).argmax(1) == y
    found = fgsm(model, x, y, threat, torch.Generator())
    model.zero_grad()
    expected = right & (model(found).argmax(1) == y)
    assert torch.equal(result.correct["fgsm"], expected)
    assert 0 < result.accuracy["fgsm"] < result.accuracy["clean"]
    assert "fgsm" in result.card()
