"""Settings from recipes, YAML and flags."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from yopo import PMP
from yopo.cli.training import settings_typed
from yopo.models import SmallCNN
from yopo.runs.api import configure
from yopo.runs.build import build_method, build_optimizer
from yopo.runs.overlay import nested, overlay
from yopo.runs.recipes import RECIPES, method_tree, recipe
from yopo.runs.schedule import rate
from yopo.runs.sections import L2Config, chosen, read_number
from yopo.runs.settings import Config, fields, rescaled, validate, with_radius


def test_flags_over_a_recipe() -> None:
    tree = overlay(recipe("cifar10-yopo-5-3"), nested({"method.m": "3", "threat.eps": "6/255"}))
    config = validate(tree)
    assert config.method == chosen({"name": "yopo", "m": 3, "n": 3})
    assert config.threat.eps == 6 / 255
    assert config.model.name == "preactresnet18"


def test_fractions() -> None:
    assert read_number("0.3", "x") == 0.3
    assert read_number("8/255", "x") == 8 / 255
    assert read_number("2.5 / 255", "x") == 2.5 / 255
    for text in ("", "8/", "/8", "1/0", "1/2/3", "eps"):
        with pytest.raises(ValueError, match="expected a number for x"):
            read_number(text, "x")


def test_another_method_by_flag_drops_what_belonged_to_the_old_one() -> None:
    flags = nested({"method.name": "pgd", "method.steps": "7", "threat.name": "l2"})
    config = validate(overlay(recipe("mnist-yopo-5-10"), flags))
    assert config.method == chosen({"name": "pgd", "steps": 7})
    assert config.threat == L2Config()


def test_what_is_not_the_old_ones_own_stays() -> None:
    tree = overlay(recipe("cifar10-pgd-10"), nested({"schedule.name": "cosine"}))
    assert validate(tree).schedule.warmup == 1
    tree = overlay(recipe("cifar10-fast"), nested({"data.name": "folder"}))
    assert validate(tree).data.crop == 4
    tree = overlay(recipe("cifar10-pgd-10"), nested({"model.name": "wideresnet"}))
    assert validate(tree).model.channels_last
    assert validate(tree).model.options == {}
    tree = overlay(recipe("demo"), nested({"model.options.width": "32"}))
    assert validate(tree).model.options == {"width": 32, "hidden": 100}


def test_another_number_of_epochs_moves_the_schedule_along() -> None:
    config = validate(rescaled(recipe("cifar10-yopo-5-3"), 20))
    assert (config.epochs, config.schedule.drops, config.schedule.warmup) == (20, [15, 18], 0.5)


def test_numbers_lists_and_options_from_strings() -> None:
    config = validate(
        nested(
            {
                "optimizer.lr": "1/8",
                "schedule.drops": "3,4.5",
                "model.options.width": "16",
                "model.options.final_bn": "false",
                "data.flip": "true",
            }
        )
    )
    assert config.optimizer.lr == 0.125
    assert config.schedule.drops == [3, 4.5]
    assert config.model.options == {"width": 16, "final_bn": False}
    assert config.data.flip is True
    for words, drops in (("[30, 36]", [30, 36]), ("[]", []), ("", [])):
        assert validate(nested({"epochs": "40", "schedule.drops": words})).schedule.drops == drops


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"epoch": "3"}, r"no setting epoch; did you mean epochs\?"),
        ({"method.name": "yopoo"}, r"no method 'yopoo'; did you mean yopo\?"),
        ({"method.name": "yopo", "method.mm": "3"}, r"did you mean method\.m\?"),
        ({"method.name": "pgd", "method.m": "3"}, r"no setting method\.m; there are: name, steps"),
        ({"threat.epz": "1"}, r"did you mean threat\.eps\?"),
        ({"pgd": "3"}, r"no setting pgd;"),
        ({"method.free": "3"}, r"no setting method\.free; there are: name, m"),
        ({"threat.eps": "0"}, r"threat\.eps: .*greater than 0, got '0'"),
        ({"threat.eps": "8/0"}, r"threat\.eps: .*valid number"),
        ({"method.m": "0"}, r"method\.m: .*greater than or equal to 1"),
        ({"epochs": "many"}, r"epochs: .*valid integer.*got 'many'"),
        ({"ema": "1"}, r"ema: .*less than 1"),
        ({"model.options": "3"}, r"model\.options: .*as --model\.options\.width 16"),
        ({"data.path": "x" * 5000}, r"data\.path: expected a path of at most 1,000"),
        ({"model.options.width": "[1"}, r"model\.options: .*is not YAML"),
        ({"epochs": "3", "epochs.foo": "3"}, r"does not go together"),
    ],
)
def test_mistakes_are_named(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(nested(flags))


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)flop;.*epoch;"):
        validate(nested({"epoch": "3", "data.flop": "1"}))


def test_a_configuration_survives_yaml() -> None:
    config = validate(recipe("cifar10-trades-yopo-3-4"))
    assert validate(yaml.safe_load(yaml.safe_dump(config.tree()))) == config


def test_every_recipe_is_valid_and_follows_the_papers_setup() -> None:
    for name, (text, tree) in RECIPES.items():
        assert validate(tree), name
        assert text
    yopo = validate(recipe("cifar10-yopo-5-3"))
    assert (yopo.epochs, yopo.batch, yopo.optimizer.lr) == (40, 256, 0.2)
    assert yopo.optimizer.weight_decay == pytest.approx(5e-4 / 5)
    assert yopo.schedule.drops == [30, 36]
    assert "warm-up" in yopo.notes
    pgd = validate(recipe("cifar10-wrn-pgd-10"))
    assert (pgd.epochs, pgd.optimizer.lr, pgd.schedule.drops) == (105, 0.05, [79, 90, 100])
    trades = validate(recipe("cifar10-trades-10"))
    assert (trades.method.name, trades.optimizer.lr, trades.epochs) == ("trades", 0.2, 105)


def test_unknown_recipes_get_near_names() -> None:
    with pytest.raises(ValueError, match=r"did you mean .*cifar10-yopo-5-3"):
        recipe("cifar-yopo-5-3")


@pytest.mark.parametrize(
    ("spec", "tree"),
    [
        ("natural", {"name": "natural"}),
        ("pgd-10", {"name": "pgd", "steps": 10}),
        ("yopo-5-3", {"name": "yopo", "m": 5, "n": 3}),
        ("trades-yopo-3-4", {"name": "trades-yopo", "m": 3, "n": 4}),
        ("free-8", {"name": "free", "m": 8}),
        ("yopo", {"name": "yopo"}),
        ("pmp", {"name": "pmp"}),
        ("pmp-3", {"name": "pmp", "m": 3}),
    ],
)
def test_methods_by_their_paper_names(spec: str, tree: dict[str, object]) -> None:
    assert method_tree(spec) == tree


@pytest.mark.parametrize("spec", ["yopo-5", "pgd-1-2", "yoyo-5-3", "natural-3", "pgd--3", ""])
def test_bad_method_names(spec: str) -> None:
    with pytest.raises(ValueError, match="methods are written like"):
        method_tree(spec)


def test_layers_of_pmp_are_names_with_commas() -> None:
    flags = nested({"method.name": "pmp", "method.layers": "conv1,pool1"})
    method = build_method(validate(flags), SmallCNN(), torch.optim.SGD([torch.zeros(1)]))
    assert isinstance(method, PMP)
    assert method.dynamics.names == ["conv1", "pool1"]


def test_nesterov_wants_momentum() -> None:
    flags = {"optimizer.nesterov": "true", "optimizer.momentum": "0"}
    with pytest.raises(ValueError, match=r"expected optimizer\.momentum above 0, got 0; .*false"):
        build_optimizer(validate(nested(flags)), SmallCNN())
    # A recipe's own, too: cifar10-fast has it.
    with pytest.raises(ValueError, match=r"--optimizer\.nesterov false"):
        build_optimizer(configure("cifar10-fast", {"optimizer": {"momentum": 0}}), SmallCNN())
    plain = flags | {"optimizer.nesterov": "false"}
    assert build_optimizer(validate(nested(plain)), SmallCNN()).defaults["momentum"] == 0


def test_settings_are_listed() -> None:
    names = [name for name, _, _ in fields()]
    for name in ("epochs", "method.m", "threat.eps", "data.root", "schedule.drops"):
        assert name in names


def told_of_methods_and_threats() -> Iterator[str]:
    """Each of their settings as `--settings` shows it, and what wrong values of it are told."""
    for name, default, text in fields():
        section, _, setting = name.partition(".")
        if section not in ("method", "threat"):
            continue
        yield " | ".join([name, default, text]).rstrip()
        kind = text.partition(")")[0].removeprefix("(")
        for value in ("-1", "0", "1/2", "1e10", "x" * 1001) if setting != "name" else ("yopp",):
            flags = {name: value} if setting == "name" else {f"{section}.name": kind, name: value}
            try:
                said = repr(getattr(validate(nested(flags)), section).model_dump()[setting])
            except ValueError as error:
                said = str(error)
            yield f"    {value[:20]}: {said[:90]}"


def test_settings_of_methods_and_threats_stay_as_they_are() -> None:
    """Names, defaults, words, bounds and refusals, as they were when each was written by hand."""
    told = Path(__file__).with_name("settings.txt").read_text().splitlines()
    assert list(told_of_methods_and_threats()) == told


def test_schedules() -> None:
    def at(epoch: float, **schedule: object) -> float:
        config = validate({"epochs": 10, "optimizer": {"lr": 1.0}, "schedule": schedule})
        return rate(config, epoch)

    assert at(5, name="constant") == 1
    assert [at(e, name="piecewise", drops=[4, 8]) for e in (0, 3.9, 4, 8)] == pytest.approx(
        [1, 1, 0.1, 0.01]
    )
    assert at(5, name="cosine") == pytest.approx(0.5)
    assert at(10, name="cosine") == pytest.approx(0)
    assert at(1, name="cosine", warmup=2) == pytest.approx(0.5, rel=1e-3)
    assert at(2, name="onecycle", warmup=2) == 1
    assert at(6, name="onecycle", warmup=2) == pytest.approx(0.5)
    assert at(0, name="constant", warmup=1) > 0
    # As the list of settings says: a onecycle without a warm-up has one all the same.
    assert at(2.9, name="onecycle") < at(3, name="onecycle") == 1
    about = {name: text for name, _, text in fields()}["schedule.warmup"]
    assert "there 0 means 30% of the epochs" in about


PIECEWISE = [name for name in RECIPES if configure(name).schedule.name == "piecewise"]


@pytest.mark.parametrize("name", PIECEWISE)
def test_a_drop_that_rounding_moved_comes_at_the_first_step_of_its_epoch(name: str) -> None:
    """Not after it: that step would be made at ten times the rate."""
    given, before = recipe(name), configure(name)
    for epochs in range(2, 201):
        config = validate(rescaled(given, epochs))
        assert len(config.schedule.drops) == len(before.schedule.drops)
        for epoch in range(math.ceil(config.schedule.warmup), epochs):
            assert rate(config, epoch) == rate(config, epoch + 1e-4), (epochs, epoch)
        past = rate(config, epochs - 1e-4), rate(before, before.epochs - 1e-4)
        assert past[0] == pytest.approx(past[1])


def test_defaults_make_a_run() -> None:
    assert Config().tree()["method"]["name"] == "yopo"


def test_another_radius_takes_the_step_along() -> None:
    def step(*flags: str) -> float | None:
        return configure("demo", settings_typed(list(flags))).threat.step

    assert step() == pytest.approx(0.3 / 8)
    assert step("--threat.eps", "8/255") == pytest.approx(1 / 255)
    assert step("--threat.eps", "0.15") == pytest.approx(0.15 / 8)
    assert step("--threat.eps", "8/255", "--threat.step", "2/255") == pytest.approx(2 / 255)
    assert step("--threat.name", "linf", "--threat.eps", "8/255") == pytest.approx(1 / 255)
    assert step("--threat.name", "l2", "--threat.eps", "2") is None
    assert with_radius({"threat": {"step": 0.02}}, {"eps": "0.1"}) == {"threat": {"step": 0.02}}
    with pytest.raises(ValueError, match=r"threat\.eps"):
        step("--threat.eps", "much")


def test_what_a_file_lists_instead_of_words_is_refused(tmp_path: Path) -> None:
    """Met by fuzzing: a list has no place among the names of settings."""
    for odd in ("[]", "{}", "1", "null"):
        file = tmp_path / "odd.yaml"
        file.write_text(f"fit: [{odd}]\n")
        with pytest.raises(ValueError, match="fit"):
            configure(file, {"epochs": 2})
