"""docs/extending.md: its Python is run as it stands there, and does what the page says."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import yopo
from tests.conftest import Batch, bn_convnet, convnet, grads
from tests.engine.test_engine import Build, compare, several
from tests.pages import DOCS, fenced
from tests.robust import trained
from tests.tiny import PATIENCE, command_line, forkserver
from yopo.attacks.names import parse_all
from yopo.bench.literal import literal_loop
from yopo.methods import registry
from yopo.report.records import read_runs
from yopo.runs.build import propagations
from yopo.runs.recipes import method_tree
from yopo.runs.settings import fields, validate

PAGE = DOCS / "extending.md"
BLOCKS = fenced(PAGE.read_text(), "python")
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
        assert len(block.splitlines()) < 30


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


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:TensorFloat32", "ignore:The .grad attribute of a Tensor"
)
@pytest.mark.parametrize("compile", [False, True])
def test_the_engine_makes_the_same_steps(mixed: Any, batch: Batch, compile: bool) -> None:
    build: Build = lambda net, _, threat: mixed(net, threat, k=2)  # noqa: E731
    compare(convnet(), build, several(batch, 3), yopo.Linf(0.1), 1e-9, compile=compile)


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
    assert registry.said(tree["method"]) == "MIXED-4"
    net = convnet()
    assert literal_loop("mixed-4", net, torch.optim.SGD(net.parameters(), 0.1), 0.1, 0.02) is None
    assert propagations(validate(tree)) == pytest.approx(4 * 2 / 3 + 2)


def yopo_in(folder: Path, words: list[str]) -> None:
    os.chdir(folder)
    command_line(words, "said")


def test_its_file_is_a_command_line_that_knows_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[0])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
        )

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
    for words, status, told in (
        ([*evaluate[1:], "--samples", "20", "--device", "cpu"], 2, "no method 'mixed'"),
        (["report", str(out), "--out", "page.html"], 0, "page.html"),
    ):  # by yopo itself: a file names no code
        process = forkserver().Process(target=yopo_in, args=(tmp_path, words))
        process.start()
        process.join(PATIENCE)
        said = (tmp_path / "said").read_text()
        assert process.exitcode == status, said
        assert told in said


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


# ---------------------------------------------------------------- what an own attack may not do


Attack = Callable[[nn.Module, Tensor, Tensor, yopo.Threat, torch.Generator], Tensor]
evaluate = partial(yopo.evaluate, checks=False)


def outside(_m: nn.Module, x: Tensor, _y: Tensor, _t: yopo.Threat, _g: torch.Generator) -> Tensor:
    return (x + 0.3).clamp(0, 1)


def off_the_box(_m: nn.Module, x: Tensor, _y: Tensor, t: yopo.Threat, _g: object) -> Tensor:
    return x + t.eps


def no_numbers(_m: nn.Module, x: Tensor, _y: Tensor, _t: yopo.Threat, _g: object) -> Tensor:
    return x * float("nan")


def one_image(_m: nn.Module, x: Tensor, _y: Tensor, _t: yopo.Threat, _g: object) -> Tensor:
    return x[:1]


def nothing(_m: nn.Module, _x: Tensor, _y: Tensor, _t: yopo.Threat, _g: object) -> Any:
    return None


@pytest.mark.parametrize("threat", [yopo.Linf(0.2), yopo.L2(1.0)])
@pytest.mark.parametrize(
    ("attack", "told"),
    [
        (outside, "outside left the threat's ball, or the box .0, 1., by [01]"),
        (off_the_box, "off_the_box left the threat's ball, or the box .0, 1., by [01]"),
        (no_numbers, "no_numbers left the threat's ball, or the box .0, 1., by nan"),
        (one_image, r"expected one_image to return images \(10, 1, 28, 28\), got \(1, 1, 28, 28\)"),
        (nothing, "expected nothing to return images .*, got NoneType"),
    ],
)
def test_what_is_no_attack_on_this_threat_is_refused(
    attack: Attack, told: str, threat: yopo.Threat, digits: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, x, y = digits
    with pytest.raises(ValueError, match=told):
        evaluate(model, (x, y), threat, [attack], batch=10)


def noisy(m: nn.Module, x: Tensor, y: Tensor, t: yopo.Threat, g: torch.Generator) -> Tensor:
    """An attack that leaves all it can."""
    assert not m.training
    assert not torch.is_inference_mode_enabled()
    m.train()
    found = x + t.start(x, g)
    leaf = found.clone().requires_grad_()
    nn.functional.cross_entropy(m(leaf), y).backward()
    x.zero_()
    y.zero_()
    return found.requires_grad_()


def test_an_attack_leaves_the_model_as_it_was(batch: Batch) -> None:
    model = bn_convnet()
    model.eval()
    x, y = batch[0], model(batch[0]).argmax(1)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        result = evaluate(model, (x, y), yopo.Linf(0.1), [noisy, "pgd-2"], examples=True)
        again = evaluate(model, (x, y), yopo.Linf(0.1), ["pgd-2"])
    assert result.accuracy["clean"] == 1  # so it had all images
    assert torch.equal(result.correct["pgd-2"], again.correct["pgd-2"])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert result.propagations["noisy"] == pytest.approx(2 / 3 + 1 / 3)  # its pass, and the verdict


def test_an_attack_draws_by_the_seed(batch: Batch) -> None:
    model, drawn = convnet().eval(), []
    x, y = batch[0], model(batch[0]).argmax(1)

    def draws(_m: nn.Module, x: Tensor, _y: Tensor, _t: yopo.Threat, g: torch.Generator) -> Tensor:
        drawn.append(torch.rand(3, generator=g))
        return x

    for seed in (0, 0, 1):
        evaluate(model, (x, y), yopo.Linf(0.1), [draws], seed=seed, batch=6)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    evaluate(model, (x, y), yopo.Linf(0.1), [draws], batch=3)
    assert not torch.equal(drawn[3], drawn[4])


def shifts(m: nn.Module, x: Tensor, _y: Tensor, _t: yopo.Threat, _g: object) -> Tensor:
    """Statistics of another kind of image, and no perturbation."""
    m.train()
    for _ in range(20):
        m(torch.zeros_like(x))
    return x


def test_the_verdict_is_of_the_model_that_was_given(batch: Batch) -> None:
    model = bn_convnet().eval()
    x, y = batch[0], model(batch[0]).argmax(1)
    assert evaluate(model, (x, y), yopo.Linf(0.1), [shifts], batch=3).accuracy["shifts"] == 1


class Breaks(nn.Module):
    """NaN for what is brighter than the clean image."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1).mean(1, keepdim=True) - 0.5
        return torch.cat([-z, z], 1).where(z <= 0.05, float("nan"))


def test_a_nan_proves_nothing() -> None:
    x = torch.full((4, 1, 2, 2), 0.54)
    y = torch.ones(4, dtype=torch.long)  # not what argmax makes of NaN

    def lighter(_m: nn.Module, x: Tensor, _y: Tensor, t: yopo.Threat, _g: object) -> Tensor:
        return x + t.eps

    assert evaluate(Breaks(), (x, y), yopo.Linf(0.1), [lighter]).accuracy["lighter"] == 1
    darker = names_of(BLOCKS[2])["fgsm"]
    assert evaluate(Breaks(), (x, y), yopo.Linf(0.1), [darker]).accuracy["fgsm"] == 0


def test_its_batches_are_not_kept(digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path) -> None:
    model, x, y = digits
    strength = [0.0, 1.0]

    def changes(
        model: nn.Module, x: Tensor, y: Tensor, threat: yopo.Threat, generator: torch.Generator
    ) -> Tensor:
        found: Tensor = names_of(BLOCKS[2])["fgsm"](model, x, y, threat, generator)
        return x + strength.pop(0) * (found - x)

    threat, each = yopo.Linf(0.2), []
    for _ in range(2):
        result = evaluate(model, (x, y), threat, ["pgd-2", changes], state=tmp_path, batch=60)
        each.append(result.accuracy["changes"])
    assert each[1] < each[0] == result.accuracy["clean"]
    assert [path.name for path in tmp_path.glob("*/pgd-2*")] == ["pgd-2.0.0.safetensors"]
    assert not [*tmp_path.glob("*/changes*")]


def test_names_of_attacks_are_told_apart() -> None:
    def cw(*_: object) -> Tensor:
        raise NotImplementedError

    assert [a.name for a in parse_all(["clean", outside, "pgd-3", nothing])] == [
        "clean",
        "outside",
        "pgd-3",
        "nothing",
    ]
    with pytest.raises(ValueError, match="cw is an attack of ours; give yours another __name__"):
        parse_all(["pgd-3", cw])
    with pytest.raises(ValueError, match="each attack once, got outside and outside"):
        parse_all([outside, "pgd-3", outside])
    with pytest.raises(TypeError, match="expected attacks by name, as pgd-20, or functions"):
        parse_all(["pgd-3", 20])  # type: ignore[list-item]
