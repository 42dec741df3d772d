"""A claim's network in RobustBench's own classes."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest
import torch

import yopo
from tests.published import write_evaluation, write_network
from tests.runs.test_robustbench import CIFAR10, PAPER
from yopo.runs.overlay import Tree
from yopo.runs.robustbench import claim_run

PACKAGE = Path(sys.prefix) / "robustbench" / "robustbench"
pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="needs robustbench (make frameworks)")


@pytest.fixture(autouse=True)
def robustbench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules of architectures, without what the package itself imports to fetch weights."""
    for name in ("robustbench", "robustbench.model_zoo"):
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(PACKAGE.parent / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, module_from_spec(spec))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("name", "options", "architecture"),
    [
        ("preactresnet18", {}, "PreActResNet-18"),
        ("preactresnet18", {"final_bn": False, "blocks": [1, 2, 1, 1]}, "PreActResNet, blocks"),
        ("wideresnet", {"depth": 16, "width": 2}, "WideResNet-16-2"),
        ("wideresnet", {"depth": 10, "width": 1}, "WideResNet-10-1"),
    ],
)
def test_the_written_network_answers_as_ours(
    name: str, options: Tree, architecture: str, normalize: bool, tmp_path: Path
) -> None:
    over = {"options": options, "normalize": normalize}
    net = write_network(tmp_path / "run", name, over=over, data=CIFAR10)
    write_evaluation(tmp_path / "run", net)
    done = claim_run(tmp_path / "run", PAPER)
    assert done.compared
    assert done.entry["architecture"].startswith(architecture)
    space: dict[str, type[torch.nn.Module]] = {}
    exec((done.folder / "Doe2026Fast.py").read_text(), space)
    theirs = space["Doe2026FastNet"]().eval()
    assert type(theirs).__bases__[0].__module__.startswith("robustbench.model_zoo.architectures.")
    theirs.load_state_dict(torch.load(done.folder / "Doe2026Fast.pt", weights_only=True))
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs(x), yopo.load(tmp_path / "run")(x), atol=1e-4)


def test_a_network_that_answers_otherwise_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default block takes the shortcut from before BatchNorm."""
    from yopo.runs import robustbench

    net = write_network(
        tmp_path / "run", "preactresnet18", over={"options": {"blocks": [1] * 4}}, data=CIFAR10
    )
    write_evaluation(tmp_path / "run", net)
    before = robustbench.translated

    def other(*given: object) -> robustbench.Translated:
        there = before(*given)  # type: ignore[arg-type]
        there.options["out_shortcut"] = False
        return there

    monkeypatch.setattr(robustbench, "translated", other)
    with pytest.raises(RuntimeError, match="answers otherwise: a logit differs by"):
        claim_run(tmp_path / "run", PAPER)
    assert not [*(tmp_path / "run" / "robustbench").iterdir()]
