"""Weights that training begins with: whose they are, what begins anew, and that no one asks later.

timm is not here, or without its weights: a module with two of its functions stands for it.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

import yopo
from tests.tiny import BASE, Silent, tiny_data, weights
from yopo.core import tensor_files
from yopo.models import resnet50
from yopo.runs import hub
from yopo.runs.api import evaluate_run, measure_cost, train_run
from yopo.runs.overlay import Tree, overlay
from yopo.runs.progress import StopRequested
from yopo.runs.settings import Config, validate
from yopo.runs.trainer import Trainer

pytestmark = pytest.mark.usefixtures("float32")
CPU = torch.device("cpu")
OPTIONS: Tree = {"width": 2, "blocks": [1, 1]}
MODEL: Tree = {"name": "resnet50", "options": OPTIONS, "normalize": False}


@pytest.fixture(autouse=True)
def _digits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("api", "saved", "strangers"):
        monkeypatch.setattr(f"yopo.runs.{module}.build_data", lambda _: tiny_data())


def pretrained(classes: int) -> nn.Module:
    """Somebody's network, which has seen something."""
    torch.manual_seed(5)
    net = resnet50(classes, channels=1, width=2, blocks=(1, 1))
    net(torch.rand(8, 1, 16, 16))
    return net


def config(start: object, **over: object) -> Config:
    model = MODEL | {"start": None if start is None else str(start)}
    model["options"] = {} if start == "timm" else OPTIONS
    tree: Tree = {"model": model, "method": {"name": "fast"}, "epochs": 1}
    return validate(overlay(BASE | tree, over))


def begun(given: Config, out: Path) -> tuple[Trainer, Silent]:
    watch = Silent()
    return Trainer(given, tiny_data(), out, watch, CPU), watch


def written(net: nn.Module, file: Path, prefix: str = "") -> Path:
    save_file({prefix + name: tensor for name, tensor in net.state_dict().items()}, file)
    return file


# ---------------------------------------------------------------- whose they are


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("normalize", [False, [0.5, 0.2]])
def test_a_file_gives_all_weights(prefix: str, normalize: object, tmp_path: Path) -> None:
    """Bare or in a wrapper's names; the normalisation stays the run's own; the average has them."""
    net = pretrained(4)
    file = written(net, tmp_path / "net.safetensors", prefix)
    trainer, watch = begun(config(file, model={"normalize": normalize}), tmp_path / "run")
    assert watch.said == [f"training begins with the weights of {file}"]
    for model in (trainer.learner.model, trainer.learner.follower):
        mine = model.get_submodule("net") if normalize else model
        assert all(torch.equal(value, weights(mine)[name]) for name, value in weights(net).items())
    if normalize:
        assert weights(trainer.learner.model)["normalize.mean"].flatten().tolist() == [0.5]


@pytest.mark.parametrize("classes", [3, 4, 1000])
def test_a_head_for_other_classes_is_new(classes: int, tmp_path: Path) -> None:
    net = pretrained(classes)
    file = written(net, tmp_path / "net.safetensors")
    fresh, _ = begun(config(None), tmp_path / "fresh")
    trainer, watch = begun(config(file), tmp_path / "run")
    mine, theirs = weights(trainer.learner.model), weights(net)
    for name, value in mine.items():
        own = name.startswith("fc.") and classes != 4
        assert torch.equal(value, weights(fresh.learner.model)[name] if own else theirs[name])
    assert watch.said[0].endswith(", and a new fc for 4 classes") == (classes != 4)


def test_a_run_of_ours_gives_its_weights_and_its_normalisation(tmp_path: Path) -> None:
    first = config(None, model={"normalize": True})
    train_run(first, tmp_path / "first", device="cpu")
    file = tmp_path / "first" / "model-last.safetensors"
    then = config(file, model={"normalize": [0.5, 0.5]})
    trainer, _ = begun(then, tmp_path / "then")
    there = tensor_files.load_weights(file)
    assert all(torch.equal(v, there[k]) for k, v in weights(trainer.learner.model).items())
    assert there["normalize.mean"].flatten().tolist() != [0.5]
    with pytest.raises(ValueError, match=r"has a normalisation, and this network none"):
        begun(config(file), tmp_path / "none")
    # Whoever builds the network later has that of the run, whatever the settings say of pixels.
    train_run(then, tmp_path / "then", device="cpu")
    net = yopo.load(tmp_path / "then").state_dict()
    assert torch.equal(net["normalize.mean"], there["normalize.mean"])


# ---------------------------------------------------------------- what does not fit


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wide = written(resnet50(4, channels=1, width=4, blocks=(1, 1)), tmp_path / "wide.safetensors")
    deep = written(resnet50(4, channels=1, width=2, blocks=(2, 1)), tmp_path / "deep.safetensors")
    pickled = tmp_path / "net.pth"
    torch.save(pretrained(4).state_dict(), pickled)
    damaged = tmp_path / "damaged.safetensors"
    tensor_files.save_weights(damaged, weights(pretrained(4)), {})
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\7")
    cases = {
        wide: r"architecture than resnet50: conv1\.weight of shape \(4, 1, 7, 7\), not \(2, 1, 7",
        deep: r"another architecture than resnet50: layer1\.1\.\S+, which it does not have",
        pickled: "net.pth is a pickle, which can run code when read; it was not read",
        damaged: "damaged.safetensors was damaged: its checksum does not fit",
        tmp_path
        / "none.safetensors": r"no file .*none\.safetensors to begin with; give --model\.st",
        Path("timm"): r"model\.start timm is for networks of timm's, .* and this is resnet50",
    }
    for start, words in cases.items():
        for attempt in (train_run, lambda given, _, device: measure_cost(given, device)):
            with pytest.raises(ValueError, match=words):
                attempt(config(start), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- that no one asks later


def test_they_count_when_training_begins_and_never_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither resuming, nor an evaluation, nor `yopo.load` wants the file, or any trust."""
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)
    file = written(pretrained(7), tmp_path / "net.safetensors")
    given = config(file, epochs=2)
    whole = train_run(given, tmp_path / "whole", device="cpu")
    trainer, _ = begun(given, tmp_path / "run")
    monkeypatch.setattr(trainer.files.watch, "step", lambda *_: setattr(trainer, "stop", True))
    with pytest.raises(StopRequested):
        trainer.run()
    file.unlink()
    monkeypatch.setitem(sys.modules, "timm", None)
    found = train_run(given, tmp_path / "run", device="cpu", resume=True)
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert evaluate_run(tmp_path / "run", "pgd-1", device="cpu").result
    assert yopo.load(tmp_path / "run").class_names == ("a", "b", "c", "d")
    with pytest.raises(ValueError, match=r"another configuration \(model\.start\)"):
        train_run(config(None, epochs=2), tmp_path / "run", device="cpu", resume=True)
    with pytest.raises(ValueError, match=r"no file .*net\.safetensors to begin with"):
        train_run(given, tmp_path / "other", device="cpu")
    # Where the file lay is nobody else's affair.
    said = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["start"]
    assert said == str(file)
    assert hub._public(given).model.start is None
    assert hub._public(config("timm")).model.start == "timm"


# ---------------------------------------------------------------- timm's


class Timm(SimpleNamespace):
    """Two of timm's functions, and what it knows of a network."""

    def __init__(self, wrong: Exception | None = None) -> None:
        super().__init__(asked=[], wrong=wrong)

    def is_model_pretrained(self, name: str) -> bool:
        return name != "unknown"

    def get_pretrained_cfg(self, _: str) -> Any:
        return SimpleNamespace(mean=(0.5,), std=(0.25,), crop_mode="center")

    def create_model(self, name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        self.asked.append((name, pretrained))
        if pretrained and self.wrong:
            raise self.wrong
        torch.manual_seed(11 if pretrained else 12)
        classes, channels = options.get("num_classes", 1000), options["in_chans"]
        return resnet50(classes, channels=channels, width=2, blocks=(1, 1))


def of_timm(name: str = "little", **more: object) -> Config:
    model: Tree = {"name": f"timm:{name}", "start": "timm", "normalize": [0.5, 0.25]}
    return config("timm", model=model | more)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Timm:
    made = Timm()
    monkeypatch.setitem(sys.modules, "timm", made)
    return made


def test_timms_weights_are_asked_for_when_training_begins_alone(timm: Timm, tmp_path: Path) -> None:
    trainer, watch = begun(of_timm(), tmp_path / "run")
    assert timm.asked == [("little", False), ("little", True)]
    assert watch.said == ["training begins with the weights of timm, and a new fc for 4 classes"]
    theirs = weights(timm.create_model("little", pretrained=True, in_chans=1))
    mine: dict[str, Tensor] = weights(trainer.learner.model.get_submodule("net"))
    assert mine["fc.weight"].shape == (4, theirs["fc.weight"].shape[1])
    assert all(torch.equal(v, theirs[k]) for k, v in mine.items() if not k.startswith("fc."))
    train_run(of_timm(), tmp_path / "run", device="cpu")
    timm.asked.clear()
    train_run(of_timm(), tmp_path / "run", device="cpu", resume=True)
    yopo.load(tmp_path / "run")  # as it says nothing of weights, it may be built
    assert {*timm.asked} == {("little", False)}


def test_other_pixels_than_timms_are_told(timm: Timm, tmp_path: Path) -> None:
    for normalize in (False, True, [0.4, 0.25]):
        _, watch = begun(of_timm(normalize=normalize), tmp_path / "run")
        assert watch.said[0].endswith("; these are used to --model.normalize 0.5,0.25")


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("little", OSError("no network\nand more"), "no weights for little: no network; get them"),
        ("unknown", None, "no weights for unknown: it has none; .* safetensors file to --model.st"),
    ],
)
def test_without_its_weights_nothing_begins(
    name: str, wrong: Exception | None, words: str, timm: Timm, tmp_path: Path
) -> None:
    timm.wrong = wrong
    with pytest.raises(ValueError, match=f"timm gave {words}"):
        begun(of_timm(name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_network_by_flag_wants_weights_too() -> None:
    """Dropping them in silence would train from nothing."""
    tree = of_timm().tree()
    for name in ("timm:other", "resnet50"):
        assert validate(overlay(tree, {"model": {"name": name}})).model.start == "timm"
    assert validate(overlay(tree, {"model": {"start": ""}})).model.start is None
