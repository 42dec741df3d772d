"""The command line, as a user meets it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.conftest import assert_same
from tests.runs.test_tracking import Mine
from tests.tiny import PATIENCE, command_line, forkserver, tiny_data, wait_until
from yopo import cli
from yopo.cli import screen, train, training
from yopo.core import files, tensor_files
from yopo.runs import api, state, tracking
from yopo.runs.alone import alone_in
from yopo.runs.api import configure
from yopo.runs.folder import is_finished, read_config
from yopo.runs.overlay import flat, nested, overlay
from yopo.runs.settings import fields, validate
from yopo.runs.trainer import Trainer

TINY = [
    *("--data.name", "npz", "--data.held_out", "20", "--batch", "20", "--epochs", "2"),
    *("--model.options.width", "4", "--model.options.hidden", "8", "--evaluate.steps", "2"),
    *("--evaluate.images", "20", "--threat.eps", "8/255", "--threat.step", "2/255"),
    *("--method.name", "yopo", "--method.m", "2", "--method.n", "2"),
]


pytestmark = pytest.mark.usefixtures("float32")


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data, path = tiny_data(), tmp_path_factory.mktemp("data") / "tiny.npz"
    np.savez(
        path,
        x_train=data.x_train.numpy(),
        y_train=data.y_train.numpy(),
        x_test=data.x_test.numpy(),
        y_test=data.y_test.numpy(),
    )
    return path


def yopo(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["yopo", *map(str, words)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("place", [None, "state", "yopo/state"])
def test_interrupted_says_whether_anything_is_kept(
    place: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", pressed)
    if place:
        (tmp_path / place / "save-000001").mkdir(parents=True)
    assert yopo(monkeypatch, "train", "demo", "--out", tmp_path) == 130
    kept = "; what was saved is kept" if place else ""
    assert capsys.readouterr().err == f"interrupted{kept}\n"


def test_train_writes_a_run(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert yopo(monkeypatch, "train", "demo", "--out", out, "--data.path", npz, *TINY) == 0
    shown = capsys.readouterr().out
    assert "epoch    2/2" in shown
    assert "test accuracy, clean / pgd-2, 40 images" in shown
    assert str(out) in shown
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["threat"]["eps"] == 8 / 255
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in metrics] == [1, 2]
    assert {"train_seconds", "propagations", "loss", "clean", "robust"} <= metrics[0].keys()
    assert tensor_files.load_weights(out / "model.safetensors")
    assert not list(out.rglob("*.pt")) + list(out.rglob("*.pkl"))
    # a second start without --resume is refused, with it there is nothing left to do
    assert yopo(monkeypatch, "train", "demo", "--out", out, "--data.path", npz, *TINY) == 2
    assert "add --resume" in capsys.readouterr().err
    again = yopo(monkeypatch, "train", out / "config.yaml", "--out", out, "--resume")
    assert again == 0
    assert "all epochs are done; going on with the test" in capsys.readouterr().out
    kept = tmp_path / "kept"  # without checkpoints, to save space
    shutil.copytree(out, kept, ignore=shutil.ignore_patterns("state"))
    for words in ([], ["--resume"]):
        assert yopo(monkeypatch, "train", kept / "config.yaml", "--out", kept, *words) == 2
        assert "finished run without checkpoints" in capsys.readouterr().err
    other = yopo(
        monkeypatch, "train", out / "config.yaml", "--out", out, "--resume", "--batch", "40"
    )
    assert other == 2
    assert "another configuration" in capsys.readouterr().err


def test_a_log_hears_of_slow_epochs(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "demo", "--data.path", npz, *TINY, "--out")
    assert yopo(monkeypatch, *words, tmp_path / "quick") == 0
    assert "  step " not in capsys.readouterr().out
    monkeypatch.setattr(screen, "QUIET", 0.0)
    assert yopo(monkeypatch, *words, tmp_path / "slow") == 0
    assert re.search(r"epoch +1/2  step (\d+)/\1  loss \d", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demoo", "--out", "x"], "did you mean demo?"),
        (["demo", "--out", "x", "--epoch", "3"], "did you mean epochs?"),
        (["demo", "--out", "x", "--method.nam", "pgd"], "did you mean method.name?"),
        (["demo", "--out", "x", "--epochs"], "--epochs needs a value"),
        (["demo", "--out", "x", "--reusme"], "did you mean --resume?"),
        (["demo", "--out", "x", "--dryrun", "--epochs", "3"], "did you mean --dry-run?"),
        (["demo", "--out", "x", "stray"], "did not expect 'stray'"),
        (["demo"], "--out DIR"),
        ([], "expected a recipe"),
        (["demo", "--out", "x", "--data.name", "cifra10"], "cifar10"),
        (["demo", "--out", "x", "--model.name", "resnet"], "my_module:function"),
        (["demo", "--out", "x", "--model.name", "nowhere:build"], "does not import"),
        *(
            (["demo", "--out", "x", "--model.name", name], "model.name as my_module:build_model")
            for name in ("nowhere.py:build", "./nowhere:build", ":build", "nowhere:")
        ),
        (["demo", "--out", "x", "--model.options.widht", "3"], "model.options do not fit smallcnn"),
        (
            ["demo", "--out", "x", "--method", "pgd"],
            "write method.name",
        ),
        (["demo", "--out", "x", "--threat.eps", "8"], "8 of 255 is 8/255"),
        (["missing.yaml", "--out", "x"], "missing.yaml"),
        (["demo", "--out", "x", "--data.held_out", "7000"], "data.held_out below"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert yopo(monkeypatch, "train", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("yopo: ")
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "x").exists()


def takes_true(name: str) -> bool:
    """Whether true is a value of a setting, and not a word or a number that reads the same."""
    try:
        return flat(validate(nested({name: "true"})).tree())[name] is True
    except ValueError:
        return False


@pytest.mark.parametrize("name", [name for name, *_ in fields()])
def test_a_setting_of_yes_or_no_alone_is_yes(name: str) -> None:
    if name.startswith(("method.", "threat.")):  # which have others with another name
        assert name not in training.YES_OR_NO
    elif takes_true(name):
        for more in ([], ["--epochs", "3"], ["--data.name=cifar10"]):
            rest = training.settings_typed(more)
            assert training.settings_typed([f"--{name}", *more]) == overlay(
                rest, nested({name: "true"})
            )
        assert training.settings_typed([f"--{name}", "false"]) == nested({name: "false"})
    else:
        for more in ([], ["--epochs", "3"]):
            with pytest.raises(ValueError, match=f"--{name} needs a value"):
                training.settings_typed([f"--{name}", *more])


def test_an_empty_out_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert yopo(monkeypatch, "train", "demo", "--out", "", "--epochs", "0") == 2
    assert "expected a folder, got nothing" in capsys.readouterr().err


def test_a_yaml_file_lies_under_the_flags(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "mine.yaml"
    settings.write_text("epochs: 7\nseed: 5\nthreat: {eps: 4/255}\n")
    words = ("--config", settings, "--data.path", npz, *TINY[:-6], "--seed", "6", "--dry-run")
    assert yopo(monkeypatch, "train", "demo", *words) == 0
    shown = capsys.readouterr().out
    config = yaml.safe_load(shown)
    assert (config["epochs"], config["seed"], config["method"]["name"]) == (2, 6, "yopo")
    assert "propagations per image in all" in shown
    assert "minutes of training here" in shown


def test_compare_gives_one_table(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--methods", "natural,pgd-2,yopo-2-2", "--out", tmp_path, "--data.path", npz)
    assert yopo(monkeypatch, "compare", "demo", *words, *TINY[:-6]) == 0
    table = capsys.readouterr().out.split("test accuracy")[1]
    for name in ("natural", "pgd-2", "yopo-2-2"):
        assert name in table
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert (config["seed"], config["batch"]) == (0, 20)
    again = ("--resume", "--checkpoint.minutes", "5")
    assert yopo(monkeypatch, "compare", "demo", *words, *TINY[:-6], *again) == 0
    assert yopo(monkeypatch, "compare", "demo", *words, *TINY[:-6], *again, "--seed", "1") == 2
    assert "another configuration (seed)" in capsys.readouterr().err
    assert yopo(monkeypatch, "compare", "demo", "--methods", "pdg-3", "--out", tmp_path) == 2
    assert "did you mean pgd?" in capsys.readouterr().err


def test_steps_that_stay_inside_the_ball_are_told(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TINY has eps 8/255 and steps of 2/255: three of them are too few, four enough."""
    words = ("--methods", "pgd-3,pgd-4,yopo-1-3,yopo-2-2,nfgsm,pmp", "--data.path", npz)
    assert yopo(monkeypatch, "compare", "demo", *words, "--out", tmp_path, *TINY[:-6]) == 0
    told = [x for x in capsys.readouterr().out.splitlines() if "cannot reach its surface" in x]
    assert [x.split(":")[0] for x in told] == ["pgd-3", "yopo-1-3"]
    assert "3 steps of 0.00784 add up to 0.0235, less than eps = 0.0314" in told[0]
    enough = ("--threat.step", told[0].split("--threat.step ")[1].split()[0])
    three = ("train", "demo", "--method.name", "pgd", "--method.steps", "3", "--data.path", npz)
    assert yopo(monkeypatch, *three, *TINY[:-6], *enough, "--dry-run") == 0
    assert "surface" not in capsys.readouterr().out
    assert yopo(monkeypatch, *three, *TINY[:-6], "--dry-run") == 0
    assert "# 3 steps of 0.00784" in capsys.readouterr().out


def test_compare_at_equal_cost(tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method spends what was asked for, but for less than an epoch of its own."""
    epochs = {"natural": 12, "free-3": 4, "nfgsm": 7, "pgd-3": 4, "yopo-2-2": 4, "pmp": 2}
    epochs |= {"trades-2": 3, "trades-yopo-2-2": 3}
    words = ("--methods", ",".join(epochs), "--propagations", "12", "--data.path", npz)
    tiny = (*TINY[:6], *TINY[8:-6])  # without --epochs
    assert yopo(monkeypatch, "compare", "demo", *words, "--out", tmp_path, *tiny) == 0
    for name, many in epochs.items():
        result = json.loads((tmp_path / name / "result.json").read_text())
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert config["epochs"] == many
        assert 12 - result["propagations"] / many < result["propagations"] < 12.001
        assert config["schedule"]["warmup"] == pytest.approx(2 / 7 * many)  # the recipe's part


@pytest.mark.parametrize(
    ("methods", "flags", "message"),
    [
        ("natural,pgd-3", ["--propagations", "2"], "at least 3.00, an epoch of pgd-3; got 2"),
        ("pgd-3", ["--propagations", "inf"], "at least 3.00, an epoch of pgd-3; got inf"),
        ("natural", ["--dry-run"], "--dry-run is for `yopo train`"),
        ("pgd-3", ["--propagations", "9", "--epochs", "2"], "leave --epochs out"),
        ("pgd-2,pgd-3", ["--method.steps", "1"], "--method.steps contradicts pgd-2"),
        ("natural", ["--method.name", "fast"], "--method.name contradicts natural"),
        ("nfgsm,there", [], "there holds a run; add --resume"),
        ("nfgsm,there", ["--resume"], "there holds a run of another configuration"),
    ],
)
def test_compare_is_refused_before_anything_is_trained(
    methods: str,
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pgd-5" / "state" / "save-000001").mkdir(parents=True)
    (tmp_path / "pgd-5" / "result.json").write_text("{}")
    (tmp_path / "pgd-5" / "config.yaml").write_text("epochs: 3")
    words = ("--methods", methods.replace("there", "pgd-5"), "--out", tmp_path, *flags)
    assert yopo(monkeypatch, "compare", "demo", *words) == 2
    assert message.replace("there", "pgd-5") in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pgd-5"]


def test_two_processes_do_not_train_in_one_folder(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "demo", "--out", tmp_path / "run", "--data.path", npz, *TINY)
    with alone_in(tmp_path / "run"):
        assert yopo(monkeypatch, *words) == 2
    assert "another process is training in" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert yopo(monkeypatch, *words) == 0


def test_epochs_of_a_file_move_warm_ups_along_as_those_of_a_flag_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "short.yaml"
    file.write_text("epochs: 1")
    shown = []
    for words in (["--epochs", "1"], ["--config", file], ["--epochs", "1.0"]):
        monkeypatch.setattr(train, "dry_run", lambda config, _: shown.append(config))
        assert yopo(monkeypatch, "train", "demo", "--dry-run", *words) == 0
    assert shown[0] == shown[1] == shown[2]
    assert shown[0].eps_warmup < 1


def test_files_that_cannot_be_written_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "config.yaml"
    settings.write_text("epochs: 1")
    for words, message in (
        (["report", tmp_path, "--out", settings], "expected an .html file for --out"),
        (["bench", "--json", tmp_path / "no" / "b.json"], "no folder"),
        (["bench", "--json", tmp_path], "expected a file for --json"),
        (["bench", "--picture", tmp_path / "b.txt"], "expected a .png, .svg or .pdf file"),
        (["train", "--epochs", "1", "demo"], "settings come after the recipe"),
    ):
        assert yopo(monkeypatch, *words) == 2
        assert message in capsys.readouterr().err
    assert settings.read_text() == "epochs: 1"


def test_recipes_and_settings_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert yopo(monkeypatch, "recipes") == 0
    shown = capsys.readouterr().out
    for name in ("mnist-yopo-5-10", "cifar10-wrn-free-8", "cifar10-fast", "demo"):
        assert name in shown
    assert yopo(monkeypatch, "train", "--settings") == 0
    assert "--threat.eps" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo", "own", "cifar10-fast", "cifar10-trades-10"])
def test_settings_of_a_recipe_are_listed_as_it_has_them(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert yopo(monkeypatch, "train", name, "--settings", "--batch", "77") == 0
    shown = dict(re.findall(r"^  --(\S+) +(\S+) \*", capsys.readouterr().out, re.MULTILINE))
    tree = configure(name, {"batch": 77}).tree()
    kinds = {section: {"name": tree[section]["name"]} for section in ("method", "threat")}
    usual = flat(validate(kinds).tree()) | {"method.name": "yopo", "threat.name": "linf"}
    other = {k: v for k, v in flat(tree).items() if k not in usual or v != usual[k]}
    assert shown.keys() == {re.sub(r"(options)\..*", r"\1", k) for k in other} - {"notes"}
    assert shown["batch"] == "77"
    for key in shown.keys() & {"epochs", "method.m", "data.name", "schedule.name", "ema"}:
        assert shown[key] == str(other[key])


@pytest.mark.parametrize("command", [[], ["train"], ["compare"], ["data"]])
def test_help_has_examples(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yopo(monkeypatch, *command, "--help") == 0
    shown = capsys.readouterr().out
    assert "usage: yopo" in shown
    assert not command or "examples:\n  yopo" in shown


def test_a_terminal_without_our_characters() -> None:
    code = "from yopo.cli import main; main()"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "COLUMNS": "200"}
    for words in (["train", "--help"], ["train", "--settings"]):
        command = [sys.executable, "-c", code, *words]
        shown = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        assert b"--out" in shown or b"--threat.eps" in shown
        assert b"?" in shown


def test_a_full_disk_at_the_end_costs_no_result(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "demo", "--out", tmp_path / "run", "--data.path", npz, *TINY)
    for module, function, file in (
        (tensor_files, "save_weights", "model-last.safetensors"),
        (files, "write_text", "result"),
    ):
        real = getattr(module, function)

        def full(path: Path, *args: object, real: object = real, file: str = file) -> None:
            if path.name.startswith(file):
                raise OSError(28, "No space left on device")
            real(path, *args)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(module, function, full)
            assert yopo(monkeypatch, *words, "--resume") == 2
        shown = capsys.readouterr()
        assert f"could not write {file}" in shown.out
        assert "test accuracy" in shown.out
        assert "make room, then: `yopo train demo" in shown.err
        assert not (tmp_path / "run" / "result.json").exists()
    assert yopo(monkeypatch, *words, "--resume") == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_a_name_that_timm_does_not_know_gets_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the package, which answers as timm 1.0 does."""
    timm = types.ModuleType("timm")

    def create_model(name: str, **_: object) -> None:
        raise RuntimeError("out of memory" if name == "resnet18" else f"Unknown model ({name})")

    vars(timm).update(
        create_model=create_model,
        is_model=lambda name: name == "resnet18",
        list_models=lambda: ["resnet18", "resnet34", "vit_tiny"],
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    words = ("train", "demo", "--out", tmp_path / "run", "--model.name")
    assert yopo(monkeypatch, *words, "timm:resnet81") == 2
    assert "no model 'resnet81' in timm; near names: resnet18" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="out of memory"):  # an error of the network's own
        yopo(monkeypatch, *words, "timm:resnet18")


def test_own_model_and_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "def build(classes, hidden=5):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, hidden), nn.ReLU(),"
        " nn.Linear(hidden, classes))\n"
    )
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (10, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    words = ["--data.name", "folder", "--data.root", "photos", "--data.size", "8"]
    words += ["--model.name", "my_net:build", "--model.options.hidden", "7", "--epochs", "1"]
    words += ["--batch", "4", "--data.held_out", "8", "--evaluate.steps", "2"]
    assert yopo(monkeypatch, "train", "demo", "--out", "run", *words) == 0
    weights = tensor_files.load_weights(tmp_path / "run" / "model-last.safetensors")
    assert weights["1.weight"].shape == (7, 192)
    assert weights["3.weight"].shape == (2, 7)
    own = words.index("my_net:build")
    words[own + 1 : own + 3] = []
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "def one():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 1))\n"
        "def wrong():\n    return None + 3\n"
    )
    sys.modules.pop("my_net")
    words[own] = "my_net:one"
    assert yopo(monkeypatch, "train", "demo", "--out", "one", *words) == 2
    assert "a model with an output for each class, got one" in capsys.readouterr().err
    assert not (tmp_path / "one").exists()
    words[own] = "my_net:wrong"
    with pytest.raises(TypeError, match="NoneType"):  # with its own traceback
        yopo(monkeypatch, "train", "demo", "--out", "wrong", *words)
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\ndef small():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(10, 2))\n"
    )
    sys.modules.pop("my_net")
    words[own] = "my_net:small"
    assert yopo(monkeypatch, "train", "demo", "--out", "small", *words) == 2
    assert "(3, 8, 8): mat1 and mat2 shapes cannot be multiplied" in capsys.readouterr().err
    words[own - 1 : own + 1] = []
    words[words.index("--data.size") : words.index("--data.size") + 2] = []
    assert yopo(monkeypatch, "train", "demo", "--out", "uneven", *words) == 2
    assert "smallcnn is for square images, got 10x9; give --data.size 64" in capsys.readouterr().err


def test_trackers_are_told_of_training_and_evaluation_or_a_clear_word(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "demo", "--out", tmp_path / "run", "--data.path", npz, *TINY)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert yopo(monkeypatch, *words, "--track", "tensorboard") == 2
    assert "pip install 'yopo-torch[tensorboard]'" in capsys.readouterr().err
    assert yopo(monkeypatch, *words, "--track", "mlflaw") == 2
    assert "--track knows tensorboard, wandb, mlflow, trackio" in capsys.readouterr().err
    mine = Mine()
    monkeypatch.setattr(tracking, "named", lambda _: mine)
    assert yopo(monkeypatch, *words, "--track", "wandb") == 0
    assert mine.steps == [1, 2]
    assert yopo(monkeypatch, "eval", tmp_path / "run", "--samples", "8", "--track", "wandb") == 0
    assert mine.told[-1][1].keys() == {"eval/clean", "eval/pgd-20", "eval/worst", "eval/eps"}
    assert mine.begun == [("run", None), ("run", "number 7")]
    folder = ("compare", "demo", "--methods", "natural", "--out", tmp_path / "both")
    assert yopo(monkeypatch, *folder, "--data.path", npz, *TINY[:-6], "--track", "wandb") == 0
    assert mine.begun[2:] == [("natural", None)]


# ---------------------------------------------------------------- in processes of their own


def start(
    out: Path, npz: Path, *more: str, launcher: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "-m", "yopo", "train", "demo", "--out", str(out)]
    command += ["--data.path", str(npz), *TINY, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def wait_for_epoch(out: Path, process: subprocess.Popen[str]) -> None:
    metrics = out / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()))


def test_ctrl_c_in_the_final_test_is_answered_and_loses_no_training(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a large test set it may take hours; the same command makes it again."""
    real = Trainer._measure

    def interrupted(trainer: Trainer, shown: str) -> tuple[dict[str, float], str]:
        os.kill(os.getpid(), signal.SIGINT)
        return real(trainer, shown)

    words = ("train", "demo", "--out", tmp_path / "run", "--data.path", npz, *TINY)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_measure", interrupted)
        assert yopo(patch, *words) == 130
    shown = capsys.readouterr().out
    assert "stopping when this batch is done; Ctrl-C again leaves at once" in shown
    assert "stopped and saved. To go on: " in shown
    assert not (tmp_path / "run" / "result.json").exists()
    assert yopo(monkeypatch, *words, "--resume") == 0
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(
    number: signal.Signals, tmp_path: Path, npz: Path
) -> None:
    out, said = tmp_path / "run", tmp_path / "said"
    words = ["train", "demo", "--out", str(out), "--data.path", str(npz), *TINY]
    words += ["--epochs", "5000"]
    process = forkserver().Process(target=command_line, args=(words, str(said)), daemon=True)
    process.start()
    metrics = out / "metrics.jsonl"
    wait_until(lambda: not process.is_alive() or (metrics.exists() and metrics.read_text()))
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(PATIENCE)
    assert process.exitcode == 130
    assert f"To go on: {shlex.join(['yopo', *words])} --resume" in said.read_text()
    values = state.load(state.saved(out / "state")[0]).values
    assert values["progress"]["epoch"] >= 1


def test_what_to_go_on_with_is_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/yopo", *words])
        return training.same_command()

    compare = ("compare", "demo", "--methods", "natural,pgd-2", "--out", "my runs")
    assert typed(*compare) == "yopo compare demo --methods natural,pgd-2 --out 'my runs' --resume"
    assert typed(*compare, "--resume") == typed(*compare)
    assert typed("reproduce", "table2", "--out", "x") == "yopo reproduce table2 --out x"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert typed("train", "demo") == "torchrun as before, -m yopo train demo --resume"


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_torchrun_trains_and_a_killed_rank_ends_the_job_which_resumes(
    tmp_path: Path, npz: Path
) -> None:
    out = tmp_path / "two"
    process = start(out, npz, "--epochs", "5000", launcher=TWO)
    wait_for_epoch(out, process)
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    ranks = [int(pid) for pid in listed.stdout.split()]
    assert len(ranks) >= 2
    os.kill(ranks[-1], signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    done = len((out / "metrics.jsonl").read_text().splitlines())
    # one process goes on from the last checkpoint of two
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["epochs"] == 5000
    single = start(out, npz, "--epochs", "5000", "--resume")
    metrics = out / "metrics.jsonl"
    wait_until(lambda: single.poll() or len(metrics.read_text().splitlines()) >= done + 2)
    assert single.poll() is None
    single.send_signal(signal.SIGTERM)
    shown, _ = single.communicate(timeout=PATIENCE)
    assert "going on from epoch" in shown
    lines = (out / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines]
    assert epochs == list(range(1, len(epochs) + 1))


def test_training_may_use_a_larger_ball_than_the_threat(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for eps, step, part in (("8/255", "2/255", "2"), ("16/255", "4/255", "1")):
        out = tmp_path / part
        words = ["--data.path", npz, *TINY, "--eps_warmup", "1"]
        words += ["--threat.eps", eps, "--threat.step", step, "--train_eps", part]
        assert yopo(monkeypatch, "train", "demo", "--out", out, *words) == 0
        weights.append(tensor_files.load_weights(out / "model-last.safetensors"))
    assert_same(*weights, tol=0)
    assert yopo(monkeypatch, "eval", tmp_path / "2", "--attacks", "pgd-2") == 0
    about = json.loads((tmp_path / "2" / "eval.json").read_text())["about"]
    assert about["eps"] == 8 / 255


def test_a_folder_of_runs_is_no_place_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "natural").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "runs" / "natural" / name).touch()
    assert yopo(monkeypatch, "train", "demo", "--out", tmp_path / "runs") == 2
    assert "holds other runs, first natural; give another --out" in capsys.readouterr().err


def test_whoever_comes_second_does_not_train_over_a_run(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another may train and finish in the folder while this one makes itself ready."""
    words = ("train", "demo", "--out", tmp_path / "run", "--data.path", npz, *TINY)
    ready = Trainer

    def slow(*args: Any) -> Trainer:
        made = ready(*args)
        monkeypatch.setattr(api, "Trainer", ready)
        assert yopo(monkeypatch, *words, "--seed", "7") == 0
        return made

    monkeypatch.setattr(api, "Trainer", slow)
    assert yopo(monkeypatch, *words) == 2
    assert "holds a run" in capsys.readouterr().err
    assert read_config(tmp_path / "run")["seed"] == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_run_forks_does_not_keep_its_lock(tmp_path: Path) -> None:
    """A worker of a killed run lives on for seconds."""
    (tmp_path / "run" / "state").mkdir(parents=True)
    (said, says), (waits, ends) = os.pipe(), os.pipe()
    with alone_in(tmp_path / "run"):
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.write(says, b"!")
            os.read(waits, 1)  # until the other end is closed
            os._exit(0)
    os.read(said, 1)  # it has begun
    try:
        with alone_in(tmp_path / "run"):
            pass
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        for handle in (said, says, waits):
            os.close(handle)


def test_a_closed_output_is_no_fault(tmp_path: Path, npz: Path) -> None:
    words = ["train", "demo", "--out", "run", "--data.path", str(npz), *map(str, TINY)]
    command = [sys.executable, "-m", "yopo", *words]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], cwd=tmp_path)
    assert done.returncode == 0
    assert is_finished(tmp_path / "run")


def test_an_edited_file_of_settings_is_no_recipe(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data.path", npz, *TINY)
    assert yopo(monkeypatch, "train", "demo", "--out", tmp_path / "run", *words) == 0
    file = tmp_path / "run" / "config.yaml"
    text = file.read_text()
    assert "\nseed: 0" in text
    file.write_text(text.replace("\nseed: 0", "\nseed: 1"))
    assert yopo(monkeypatch, "train", file, "--out", tmp_path / "b") == 2
    assert "its checksum does not fit" in capsys.readouterr().err
    file.write_text(file.read_text().partition("\n")[2])
    assert yopo(monkeypatch, "train", file, "--out", tmp_path / "b") == 0
