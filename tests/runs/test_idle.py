"""Settings that do nothing in a training: which are refused, and of which a line is said."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.test_commands import yopo as command
from tests.tiny import BASE, Silent, tiny_data
from yopo.models import SmallCNN
from yopo.runs.api import configure, evaluate_run, measure_cost, train_run
from yopo.runs.build import build_network, build_optimizer, propagations
from yopo.runs.fitting import said_of
from yopo.runs.folder import read_settings
from yopo.runs.idle import refuse_idle, said_of_idle
from yopo.runs.overlay import Tree, nested, overlay
from yopo.runs.recipes import RECIPES
from yopo.runs.sections import DataConfig
from yopo.runs.settings import Config, rescaled, validate

pytestmark = pytest.mark.usefixtures("float32")
RECORDS = Path(__file__).parents[2] / "records"
FEW: Tree = {
    "epochs": 1,
    "batch": 200,
    "model": {"options": {"size": 28}},
    "data": {"held_out": 10},
    "method": {"name": "fast"},
    "schedule": {"warmup": 0},
    "evaluate": {"images": 10, "steps": 1},
}


def told(**flags: str) -> list[str]:
    """Of two epochs with these settings."""
    return said_of_idle(validate(nested({"epochs": "2"} | flags)))


def schedule(name: str, **flags: str) -> list[str]:
    return told(**{f"schedule.{key}": value for key, value in {"name": name, **flags}.items()})


@pytest.mark.parametrize("name", ["constant", "cosine", "onecycle"])
def test_drops_of_a_rate_that_has_none(name: str) -> None:
    no = f"no effect with schedule.name {name}: "
    so = "; the rate drops with --schedule.name piecewise"
    assert schedule(name, drops="1") == [f"{no}schedule.drops 1{so}"]
    assert schedule(name, factor="0.5") == [f"{no}schedule.factor 0.5{so}"]
    both = schedule(name, drops="30,36", factor="0.5")
    assert both == [f"{no}schedule.drops 30,36 and schedule.factor 0.5{so}"]
    assert schedule(name) == schedule("piecewise", drops="1", factor="0.5") == []


def test_drops_that_never_come() -> None:
    assert "without schedule.drops is a rate that never drops" in schedule("piecewise")[0]
    (line,) = schedule("piecewise", drops="1,2,50")
    assert line.startswith("schedule.drops 2,50 are never reached in 2 epochs; give earlier ones")


def test_phases_in_which_nothing_is_other() -> None:
    (line,) = schedule("constant", phases="1")
    assert line.startswith("no effect without --schedule.sizes or --schedule.m")
    assert line.endswith("schedule.phases 1")
    assert schedule("constant", phases="1", m="1") == []
    (line,) = schedule("constant", phases="1,9", m="1,2")
    assert line.startswith("schedule.phases 9 never begin in 2 epochs")


def test_warm_ups_that_outlast_the_run() -> None:
    for name in ("constant", "cosine", "onecycle"):
        (line,) = schedule(name, warmup="7")
        assert line.startswith("schedule.warmup 7 is longer than the 2 epochs, so the rate never")
        assert schedule(name, warmup="2") == []
    (line,) = told(eps_warmup="9")
    assert line.startswith("eps_warmup 9 is longer than the 2 epochs, so the adversary never")
    assert told(eps_warmup="2") == []


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"name": "fast"}, "its step is --method.step"),
        ({"name": "free"}, "its step is --method.step"),
        ({"name": "nfgsm"}, "its step is --method.step"),
        ({"name": "pmp"}, "the exact adversary has no steps, --method.adversary gradient has"),
        ({"name": "pmp", "adversary": "lbfgs"}, "the lbfgs adversary has no steps"),
    ],
)
def test_a_step_of_adversaries_that_take_none_of_it(flags: dict[str, str], why: str) -> None:
    method = {f"method.{key}": value for key, value in flags.items()} | {"threat.eps": "0.1"}
    (line,) = told(**method, **{"threat.step": "0.07"})
    assert line.startswith(f"no effect in training with {flags['name']}: threat.step 0.07; {why}")
    assert told(**method) == told(**method, **{"threat.step": "0.025"}) == []


def test_a_step_of_adversaries_that_take_it() -> None:
    for name in ("pgd", "trades", "yopo", "trades-yopo"):
        assert told(**{"method.name": name, "threat.step": "0.02"}) == []
    gradient = {"method.name": "pmp", "method.adversary": "gradient", "threat.step": "0.02"}
    assert told(**gradient) == []


def test_natural_training_has_no_ball() -> None:
    natural = {"method.name": "natural", "eps_warmup": "9"}
    assert told(**natural) == []
    (line,) = told(**natural, train_eps="1.25")
    assert line == "no effect in training with natural, which has no adversary: train_eps 1.25"
    assert told(**{"method.name": "pgd", "train_eps": "1.25"}) == []


def test_recipes_under_other_flags_train_and_say_it() -> None:
    few: Tree = {"data": {"held_out": 20}, "batch": 20}
    other = configure("cifar10-yopo-5-3", few, {"schedule": {"name": "cosine"}})
    assert said_of(other, tiny_data())[0].startswith("no effect with schedule.name cosine")
    fast = configure("demo", few, {"method": {"name": "fast"}})
    assert "threat.step 0.0375; its step is --method.step" in said_of(fast, tiny_data())[0]


# ---------------------------------------------------------------- what is there still goes


def built(config: Config, networks: set[str]) -> None:
    """Whether everything is made of it; of networks each once, without weights."""
    refuse_idle(config.data)
    assert propagations(config) > 0
    assert build_optimizer(config, SmallCNN(width=2, hidden=4))
    model = json.dumps(config.model.model_dump(), sort_keys=True)
    if model not in networks and ":" not in config.model.name:
        with torch.device("meta"):
            assert build_network(config.model, 10, 3, 32)
    networks.add(model)


def test_every_recipe_builds_and_says_nothing_of_its_own() -> None:
    networks: set[str] = set()
    for name, (_, tree) in RECIPES.items():
        for epochs in (1, 2, 7, 121):
            config = configure(name, {"epochs": epochs})
            assert config == validate(overlay(rescaled(tree, epochs), {"fit": config.fit}))
            # What it has from imagenet-fast is for the methods that flags may name.
            own = ["no effect in training with fast"] * (name == "imagenet-finetune")
            assert [line.partition(":")[0] for line in said_of_idle(config)] == own, name
        built(config, networks)


def test_every_record_builds() -> None:
    networks: set[str] = set()
    runs = sorted(file.parent for file in RECORDS.rglob("config.yaml"))
    assert len(runs) > 100
    old = 0
    for run in runs:
        tree = read_settings(run, run=True)
        try:
            config = validate(tree)
        except ValueError as error:  # it has settings that are none any more
            if not str(error).startswith("no setting "):
                raise
            old += 1
            continue
        built(config, networks)
    assert old < 20


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "folder", "interpolation": "bicubic"}, r"data\.interpolation is for `yopo eval`"),
        ({"name": "my:data", "interpolation": "bicubic"}, r"else's; leave it out"),
        ({"name": "my:data", "resize": 8}, r"data\.resize is for `yopo eval`"),
        ({"root": "/nonexistent"}, r"no data\.root /nonexistent, and mnist-subset .* is built in"),
        ({"name": "npz", "root": "/nonexistent"}, r"npz does not use one: .*; leave out --data\.r"),
        ({"skip_broken": True}, r"skip_broken is for folders of pictures; .* with mnist-subset"),
        ({"name": "mnist", "skip_broken": True}, r"skip_broken is for folders .* with mnist$"),
    ],
)
def test_data_of_which_nothing_is_used(data: Tree, message: str, tmp_path: Path) -> None:
    config = validate(overlay(BASE, {"data": data}))
    for attempt in (
        lambda: train_run(config, tmp_path / "run", device="cpu"),
        lambda: measure_cost(config, "cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert not (tmp_path / "run").exists()


def test_data_that_use_it(tmp_path: Path) -> None:
    here, gone = tmp_path, tmp_path / "gone"
    refuse_idle(DataConfig(root=here))  # one folder of data for several runs
    for name in ("mnist", "cifar10", "folder", "my:data"):
        refuse_idle(DataConfig(name=name, root=gone))  # what reads them says so
    for name in ("folder", "my:data"):
        refuse_idle(DataConfig(name=name, skip_broken=True))


def test_a_run_of_before_goes_on_and_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With idle settings that are refused today, once these are left out; lines are said again."""
    monkeypatch.setattr("yopo.runs.api.refuse_idle", lambda _: None)
    tree = overlay(BASE, overlay(FEW, {"threat": {"step": 0.07}}))
    idle: Tree = {"root": "/nonexistent", "skip_broken": True, "interpolation": "bicubic"}
    first, again = Silent(), Silent()
    given = validate(overlay(tree, {"data": idle}))
    train_run(given, tmp_path / "run", device="cpu", watch=first)
    monkeypatch.undo()
    assert evaluate_run(tmp_path / "run", "clean", samples=10, device="cpu").result
    train_run(validate(tree), tmp_path / "run", resume=True, device="cpu", watch=again)
    line = "no effect in training with fast: threat.step 0.07; its step is --method.step"
    assert line in first.said
    assert line in again.said


def test_what_the_command_line_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    momentum = ("--optimizer.name", "sgd", "--optimizer.momentum", "0", "--optimizer.nesterov")
    for flags, words in (
        (momentum, "expected optimizer.momentum above 0"),
        (("--data.root", "/nonexistent"), "leave out --data.root"),
    ):
        words_typed = ("train", "demo", *flags, "--out", tmp_path / "run", "--device", "cpu")
        assert command(monkeypatch, *words_typed) > 0
        shown = capsys.readouterr()
        assert words in " ".join(shown.err.split())
        assert "Traceback" not in shown.err
