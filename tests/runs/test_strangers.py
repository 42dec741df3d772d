"""Run folders and weights files from strangers: nothing in them runs, leaves or steers."""

import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from tests.cli.test_commands import yopo
from tests.fuzzing import little_memory, png, within
from tests.hostile import put, walk, write_full_run
from tests.runs.test_robustbench import PAPER
from yopo.cli.common import Terminal, clean
from yopo.core import files, tensor_files
from yopo.core.files import ODD
from yopo.data import pictures
from yopo.evaluation import card
from yopo.evaluation.model_card import Published, model_card
from yopo.models import SmallCNN
from yopo.runs import strangers
from yopo.runs.build import build_data
from yopo.runs.folder import read_evaluation
from yopo.runs.images import workers
from yopo.runs.overlay import Tree, overlay
from yopo.runs.robustbench import issue
from yopo.runs.saved import find
from yopo.runs.sections import DataConfig, ModelConfig
from yopo.runs.settings import validate

pytestmark = pytest.mark.usefixtures("float32")

OURS: Tree = {"name": "smallcnn", "options": {"width": 2, "hidden": 4}}
COMMANDS = (
    ("eval", "--samples", "4", "--attacks", "pgd-1"),
    ("diagnose", "--images", "4", "--m", "1"),
)


def write(folder: Path, model: Tree | None = None, over: Tree | None = None) -> Path:
    """A run folder with weights of our small network, whatever its settings say."""
    folder.mkdir(parents=True)
    tree = overlay(validate({"model": OURS, "threat": {"eps": 0.1}}).tree(), over or {})
    tree["model"] |= {"options": {}} | model if model else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    state = dict(SmallCNN(width=2, hidden=4).state_dict())
    for name in ("model.safetensors", "model-last.safetensors"):
        tensor_files.save_weights(folder / name, state, {"config": json.dumps(tree)})
    return folder


Ask = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command that must fail, and return what it says."""

    def ask(*words: object) -> str:
        assert yopo(monkeypatch, *words) == 2
        said = capsys.readouterr().err
        assert said.startswith("yopo: ")
        assert "Traceback" not in said
        return said

    return ask


# ---------------------------------------------------------------- code


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("os:system", {"command": "touch ran"}),
        ("subprocess:check_output", {"args": ["touch", "ran"]}),
        ("builtins:exec", {"source": "open('ran', 'w')"}),
        ("runpy:run_path", {"path_name": "evil.py"}),
        ("pickle:load", {}),
        ("evil:build", {}),
        ("yopo.models:SmallCNN", {}),
        ("torch.hub:load", {"repo_or_dir": "a/b", "model": "c"}),
        (" os:system", {"command": "touch ran"}),
        ("TIMM:os", {}),
    ],
)
def test_a_named_function_is_not_called(
    name: str, options: Tree, tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    run = write(tmp_path / "run", {"name": name, "options": options})
    for command, *words in COMMANDS:
        said = refused(command, run, *words)
        assert "--trust" in said
        assert "--model.name my_module:build_model" in said
    said = refused("eval", run / "model.safetensors")
    assert "--trust" in said
    assert not (tmp_path / "ran").exists()
    assert "evil" not in sys.modules


def test_a_function_that_makes_data_is_not_imported_without_trust(
    tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word for the network is none for the data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine_beside_evil.py").write_text(MINE)
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    over: Tree = {"data": {"name": "evil:build_data"}}
    own: Tree = {"name": "mine_beside_evil:build", "options": {"width": 2}}
    for model, words in ((None, ()), (own, ("--model.name", "mine_beside_evil:build"))):
        run = write(tmp_path / f"run-{len(words)}", model, over)
        for command, *more in COMMANDS:
            said = refused(command, run, *more, *words)
            assert "names its data evil:build_data, which was not imported" in said
            assert "--trust" in said
    assert not (tmp_path / "ran").exists()
    assert "evil" not in sys.modules


MINE = """
from yopo.models import SmallCNN
def build(classes, width):
    return SmallCNN(classes, width=width, hidden=4)
"""


@pytest.mark.parametrize("words", [["--trust"], ["--model.name", "mine_of_trust:build"]])
def test_the_users_own_word_builds_it(
    words: list[str],
    tmp_path: Path,
    refused: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine_of_trust.py").write_text(MINE)
    run = write(tmp_path / "run", {"name": "mine_of_trust:build", "options": {"width": 2}})
    for command, *more in COMMANDS:
        assert yopo(monkeypatch, command, run, *more, *words) == 0
    other = refused("eval", run, "--model.name", "another:build")
    assert "as" in other
    assert "'mine_of_trust:build', got 'another:build'" in other


def test_a_run_is_trained_from_what_the_user_says_alone(
    tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever config.yaml lies in the folder, --resume builds the recipe's network."""
    from yopo.runs import learner

    def build(config: ModelConfig, *_: object) -> nn.Module:
        assert config.name == "smallcnn"
        raise ValueError("the recipe's")

    monkeypatch.setattr(learner, "build_model", build)
    run = write(tmp_path / "run", {"name": "os:system", "options": {"command": "false"}})
    (run / "state" / "save-000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="the recipe's"):
        yopo(monkeypatch, "train", "demo", "--out", run, "--resume")
    (run.parent / "all").mkdir()
    run.rename(run.parent / "all" / "yopo-1-1")
    (run.parent / "all" / "yopo-1-1" / "result.json").write_text("{}")
    words = ("--methods", "yopo-1-1", "--out", run.parent / "all", "--resume")
    said = refused("compare", "demo", *words)
    assert "holds a run of another configuration" in said
    assert "model.name" in said
    run = write(tmp_path / "table4" / "YOPO-5-3-seed-0".lower(), {"name": "os:system"})
    out = ("--quick", "--out", run.parent)
    assert "other settings (" in refused("reproduce", "table2", "--rows", "YOPO-5-3", *out)


# ---------------------------------------------------------------- timm


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A package that notes what it is asked for."""
    asked: list[Any] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append((name, options))
        return SmallCNN(width=2, hidden=4)

    fake = SimpleNamespace(create_model=create_model, is_model=lambda _: True)
    monkeypatch.setitem(sys.modules, "timm", fake)
    return asked


ADDRESSES = [
    "hf-hub:a/b",
    "hf_hub:a/b",
    "local-dir:/tmp/x",
    "timm/resnet18",
    "/etc/passwd",
    "../resnet18",
    "https://example.com/x",
    "resnet18 ",
    "",
    "a.b.c",
]
OPTIONS: list[Tree] = [
    {"checkpoint_path": "/tmp/x.pth"},
    {"pretrained": True},
    {"pretrained_cfg": {"url": "https://example.com"}},
    {"pretrained_cfg_overlay": {"file": "/tmp/x"}},
    {"cache_dir": "/tmp"},
    {"scriptable": True},
    {"features_only": True},
    {"global_pool": "https://example.com"},
    {"global_pool": "../../x"},
    {"act_layer": "os.system"},
    {"img_size": 10**9},
    {"img_size": [32] * 1000},
    {"img_size": {"a": 1}},
    {"embed_dim": 64},
    {"drop_rate": float("inf")},
]


@pytest.mark.parametrize("name", ADDRESSES)
def test_timm_is_not_asked_for_an_address(
    name: str, tmp_path: Path, refused: Ask, timm: list[Any]
) -> None:
    assert "--trust" in refused("eval", write(tmp_path / "run", {"name": f"timm:{name}"}))
    assert not timm


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_timm_is_not_given_options_that_are_not_plain(
    options: Tree, tmp_path: Path, refused: Ask, timm: list[Any]
) -> None:
    run = write(tmp_path / "run", {"name": "timm:resnet18", "options": options})
    said = refused("eval", run, "--model.name", "timm:resnet18")  # a word for its name alone
    assert "--trust" in said or "it has inf for a number" in said
    assert not timm


def test_timm_builds_plain_architectures_and_more_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timm: list[Any]
) -> None:
    plain = {"drop_rate": 0.1, "img_size": [28, 28], "global_pool": "avg", "qkv_bias": True}
    run = write(tmp_path / "run", {"name": "timm:vit_tiny.augreg_in1k", "options": plain})
    command, *words = COMMANDS[0]
    assert yopo(monkeypatch, command, run, *words) == 0
    built = ("vit_tiny.augreg_in1k", {"num_classes": 10, "in_chans": 1, **plain})
    assert timm == [built, built]  # the first one takes no memory
    run = write(tmp_path / "other", {"name": "timm:hf-hub:a/b", "options": {"pretrained": True}})
    assert yopo(monkeypatch, command, run, *words, "--trust") == 0
    assert timm[2:] == [("hf-hub:a/b", {"num_classes": 10, "in_chans": 1, "pretrained": True})]


# ---------------------------------------------------------------- time and memory


@pytest.mark.parametrize(
    "model",
    [
        {"name": "smallcnn", "options": {"width": 10**9}},
        {"name": "smallcnn", "options": {"width": 10**6}},
        {"name": "smallcnn", "options": {"hidden": 10**6}},
        {"name": "smallcnn", "options": {"size": 10**6}},
        {"name": "smallcnn", "options": {"width": 10**400}},
        {"name": "smallcnn", "options": {"width": -3}},
        {"name": "smallcnn", "options": {"width": "wide"}},
        {"name": "smallcnn", "options": {"width": 2.5}},
        {"name": "smallcnn", "options": {"width": None}},
        {"name": "smallcnn", "options": {"width": [[[]]]}},
        {"name": "smallcnn", "options": {"dropout": 7}},
        {"name": "smallcnn", "options": {"depth": 7}},
        {"name": "preactresnet18", "options": {"blocks": [10**6]}},
        {"name": "preactresnet18", "options": {"blocks": [1] * 1000}},
        {"name": "preactresnet18", "options": {"blocks": 3}},
        {"name": "preactresnet18", "options": {"width": 10**5, "blocks": [1] * 16}},
        {"name": "wideresnet", "options": {"depth": 6 * 10**5 + 4, "width": 1}},
        {"name": "wideresnet", "options": {"depth": 10, "width": 10**5}},
    ],
    ids=str,
)
def test_absurd_sizes_are_refused_before_memory_is_taken(
    model: Tree, tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = [0]
    init = nn.Parameter.__new__

    def make(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
        if data is not None and data.device.type != "meta":
            largest.append(data.numel())
        return init(cls, data, requires_grad)

    monkeypatch.setattr(nn.Parameter, "__new__", make)
    run = write(tmp_path / "run", model)
    del largest[1:]
    said = refused("eval", run)
    assert any(words in said for words in ("the file's", "--trust", "is not YAML"))
    assert max(largest) < 10**6


@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_a_network_of_timms_takes_no_memory_before_it_is_refused(
    kind: str, tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options multiply: 1024² places of 768 numbers are 3 GB in one tensor."""

    def create_model(name: str, img_size: int, patch_size: int, **_: object) -> nn.Module:
        net, places = nn.Module(), torch.zeros((img_size // patch_size) ** 2, 768)
        if kind == "parameters":
            net.register_parameter("places", nn.Parameter(places))
        else:
            net.register_buffer("places", places, persistent=False)
        return net

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    options = {"img_size": 1024, "patch_size": 1}
    run = write(tmp_path / "run", {"name": "timm:vit_base", "options": options})
    with little_memory(500 << 20):
        said = refused("eval", run)
    assert f"timm:vit_base cannot be built: it has more {kind} than the weights file" in said


def test_a_network_of_the_files_own_size_is_built() -> None:
    net = SmallCNN(width=16, hidden=40)
    held = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    config = ModelConfig(name="smallcnn", options={"width": 16, "hidden": 40})
    x = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    built = strangers.build(config, x, 10, held)
    assert {k: v.shape for k, v in built.state_dict().items()} == held
    assert {p.device.type for p in built.parameters()} == {"cpu"}
    nn.Linear(10**4, 10)  # the bound is gone


# ---------------------------------------------------------------- data


def test_data_on_another_computer_are_not_asked_for(tmp_path: Path, refused: Ask) -> None:
    for i, place in enumerate(("//host/share/x.npz", "\\\\host\\share\\x.npz")):
        data = {"data": {"name": "npz", "path": place}}
        assert "another computer" in refused("eval", write(tmp_path / str(i), None, data))
    for i, place in enumerate(("https://example.com/x.npz", "ftp://example.com/x.npz")):
        data = {"data": {"name": "npz", "path": place}}
        assert "no file" in refused("eval", write(tmp_path / f"url{i}", None, data))
    unknown = write(tmp_path / "unknown", None, {"data": {"name": "evil:load"}})
    assert "its data evil:load, which was not imported" in refused("eval", unknown)


def photos(root: Path, *splits: str) -> Path:
    """Thirty small pictures of two classes."""
    for split in splits or ("",):
        for k in range(30):
            place = root / split / "ab"[k % 2]
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(k).integers(0, 256, (28, 28, 3), np.uint8)
            Image.fromarray(pixels).save(place / f"{k}.png")
    return root


@pytest.mark.parametrize("resident", [None, False, True])
@pytest.mark.parametrize("size", [1025, 3000, 20_000, 10**9])
def test_a_strangers_pictures_are_not_blown_up(
    size: int, resident: bool | None, tmp_path: Path, refused: Ask
) -> None:
    """Thirty of them would take 100 MB to more than any machine has."""
    data = {"name": "folder", "root": str(photos(tmp_path / "photos", "train", "test"))}
    over: Tree = {"data": data | {"size": size, "resident": resident}}
    run = write(tmp_path / "run", None, over)
    with within(5), little_memory(200 << 20):
        for command, *words in COMMANDS:
            assert f"{size}x{size} pixels, and a file may ask for" in refused(command, run, *words)
    if size > 5000:
        assert "size from 1 to 5,000, got" in refused("eval", run, "--trust")
        with pytest.raises(ValueError, match=f"size from 1 to 5,000, got {size:,}"):
            build_data(validate(over).data)


def test_large_pictures_of_a_strangers_are_not_read(tmp_path: Path, refused: Ask) -> None:
    """Where no size is asked for, either."""
    root = photos(tmp_path / "photos", "train", "test")
    for file in root.rglob("*.png"):
        file.write_bytes(png(1500, 1500, 8, 0, (b"\0" * 1501) * 1500))
    over: Tree = {"data": {"name": "folder", "root": str(root), "resident": False}}
    said = refused("eval", write(tmp_path / "run", None, over))
    assert "1500x1500 pixels, and a file may ask for" in said


@given(st.none() | st.integers(0, 10**9))
def test_a_stranger_starts_no_more_processes_than_this_machine(asked: int | None) -> None:
    config = DataConfig(name="folder", workers=asked)
    mine, theirs = workers(DataConfig()), workers(strangers.bounded(config))
    assert theirs == (mine if asked is None else min(asked, mine))


def test_runs_are_found_with_their_processes_bounded(tmp_path: Path) -> None:
    run = write(tmp_path / "run", None, {"data": {"workers": 500}})
    assert find(run).config.data.workers == workers(DataConfig())
    assert find(run, trust=True).config.data.workers == 500


@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("resident", [None, False, True])
@pytest.mark.parametrize("splits", [(), ("train", "test")])
def test_a_strangers_test_set_is_the_runs_own_or_refused(
    splits: tuple[str, ...],
    resident: bool | None,
    few: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where images lie decides how pictures that are not split are drawn."""
    monkeypatch.setattr(pictures, "FEW", few)
    root = photos(tmp_path / "photos", *splits)
    config = DataConfig(name="folder", root=root, resident=resident)
    own = build_data(config).test
    rows = torch.arange(len(own))
    if (splits, resident, few) == ((), True, 0):
        with pytest.raises(ValueError, match="for which they are too many here"):
            strangers.load_data(config)
        return
    found = strangers.load_data(config).test
    assert found.labels.equal(own.labels)
    assert found.read(rows).equal(own.read(rows))


def test_missing_data_are_not_fetched(
    tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    import urllib.request

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(urllib.request, "urlopen", fetch)
    monkeypatch.setattr(subprocess, "Popen", fetch)
    monkeypatch.setenv("YOPO_DATA", str(tmp_path / "none"))
    run = write(tmp_path / "run", None, {"data": {"name": "cifar10"}})
    assert "run `yopo data get cifar10`" in refused("eval", run)


class Touch:
    """Whoever unpickles it makes the file `ran`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_data_run_no_code(tmp_path: Path, refused: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.chdir(tmp_path)
    objects = np.array([Touch()], dtype=object)
    keys = ("x_train", "y_train", "x_test", "y_test")
    np.savez(tmp_path / "x.npz", allow_pickle=True, **dict.fromkeys(keys, objects))
    run = write(tmp_path / "npz", None, {"data": {"name": "npz", "path": "x.npz"}})
    assert "cannot use x.npz" in refused("eval", run)
    batches = tmp_path / "cifar-10-batches-py"
    batches.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (batches / name).write_bytes(pickle.dumps({"data": Touch(), "labels": []}))
    run = write(tmp_path / "batches", None, {"data": {"name": "cifar10", "root": "."}})
    assert "refused to load posix.system" in refused("eval", run)
    # PostScript, for which pillow would start another program
    for split in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "photos" / split).mkdir(parents=True)
        start_of = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"
        (tmp_path / "photos" / split / "x.png").write_bytes(start_of)
    monkeypatch.setattr(subprocess, "Popen", start)
    run = write(tmp_path / "run", None, {"data": {"name": "folder", "root": "photos"}})
    assert "x.png" in refused("eval", run)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- files


def test_nothing_is_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever names the folder's links have, what they lead to stays as it is."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = write(tmp_path / "run")
    names = ["eval.json", "eval.md", "eval-examples.safetensors", "diagnose.json", "diagnose.png"]
    for name in (*names, *(f".{name}.writing" for name in names)):
        (run / name).symlink_to(victim)
    for name in ("config.yaml", "model.safetensors"):  # which are read through links
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    command, *words = COMMANDS[0]
    assert yopo(monkeypatch, command, run, *words, "--save-examples") == 0
    command, *words = COMMANDS[1]
    assert yopo(monkeypatch, command, run, *words) == 0
    assert victim.read_text() == "mine"
    assert not any((run / name).is_symlink() for name in names)


# ---------------------------------------------------------------- git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose settings, hooks and attributes all want to run a script."""
    repo, script = tmp_path / "repo", tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    script.chmod(0o755)
    home = os.environ | {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*words: str, at: Path = repo) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=at, env=home, check=True, capture_output=True)

    repo.mkdir()
    git("init", "-q", "-b", "some/branch")
    (repo / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "1")
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "core.editor", "diff.external"):
        git("config", key, str(script))
    for key in ("filter.evil.clean", "filter.evil.smudge", "diff.evil.textconv", "alias.status"):
        git("config", key, str(script))
    (repo / ".gitattributes").write_text("* filter=evil diff=evil\n")
    for hook in ("post-index-change", "fsmonitor-watchman", "pre-commit"):
        (repo / ".git" / "hooks" / hook).symlink_to(script)
    (repo / "file").write_text("2")
    return repo


def test_the_commit_is_read_and_git_is_not_asked(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    subprocess.run(["git", "status"], cwd=repository, capture_output=True)
    assert ran.exists()  # the repository is hostile indeed
    ran.unlink()
    sha = (repository / ".git" / "refs" / "heads" / "some" / "branch").read_text()[:12]
    (repository / "inside").mkdir()
    for place in (repository, repository / "inside", tmp_path / "tree"):
        monkeypatch.chdir(place)
        assert card._commit() == sha
    monkeypatch.chdir(repository)
    subprocess.run(["git", "-c", "core.fsmonitor=", "pack-refs", "--all"], check=True)
    assert not (repository / ".git" / "refs" / "heads" / "some" / "branch").exists()
    assert card._commit() == sha
    full = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    (repository / ".git" / "HEAD").write_text(full)
    assert card._commit() == sha
    ran.unlink(missing_ok=True)
    run = write(tmp_path / "run")
    command, *words = COMMANDS[0]
    assert yopo(monkeypatch, command, run, *words) == 0
    assert json.loads((run / "eval.json").read_text())["about"]["commit"] == sha
    assert not ran.exists()


@pytest.mark.parametrize(
    "head", ["ref: ../../secret", "ref: refs/../../../secret", "ref: refs/heads/none", "", "x" * 40]
)
def test_a_head_that_names_another_file_gives_no_commit(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "secret").write_text("0" * 40)
    (tmp_path / "a" / ".git" / "HEAD").write_text(head)
    monkeypatch.chdir(tmp_path / "a")
    assert card._commit() is None
    (tmp_path / "a" / ".git" / "HEAD").unlink()
    os.mkfifo(tmp_path / "a" / ".git" / "HEAD")
    assert card._commit() is None


# ---------------------------------------------------------------- words

STEER = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202e\r\x00[red]x[/red][link=http://x]y[/link]"


def test_no_name_steers_the_terminal(
    tmp_path: Path,
    refused: Ask,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steer = STEER.replace("/", "").replace("\x00", "")
    run = write(tmp_path / steer)
    for command, *words in COMMANDS:
        assert yopo(monkeypatch, command, run, *words) == 0
    assert yopo(monkeypatch, "report", run, "--out", tmp_path / "r.html") == 0
    shown = capsys.readouterr().out
    shown += refused("eval", write(tmp_path / "a", {"name": STEER}))
    shown += refused("eval", tmp_path / f"none {steer}")
    assert "\\x1b[31mred\\x9b2J\\u202e" in shown
    assert clean(shown) == shown
    console = Terminal(force_terminal=True, width=200)
    console.print(f"a {STEER} b")
    assert "\\x1b]0;title\\x07\\x1b[31mred\\x9b2J\\u202e\\r\\x00[red]x[/red]" in (
        capsys.readouterr().out
    )


EVIL = "<img src=x onerror=alert(1)>|a|\n# b [c](javascript:d) ![e](http://f) `g` **h**\x1b"


def structure(text: str) -> Counter[str]:
    """Lines, and signs that mean something in Markdown or HTML."""
    signs = Counter(re.findall(r"(?<!\\)[<\[\]|`*>]", text))
    signs.update(lines=len(text.splitlines()), control=len(ODD.findall(text)))
    return signs


def test_every_word_of_an_evaluation_is_a_word_in_markdown(tmp_path: Path) -> None:
    """In a card, in the Hub's model card, and in an issue for RobustBench."""
    run = write_full_run(tmp_path / "run")
    saved, plain = find(write(tmp_path / "other")), read_evaluation(run / "eval.json")

    def shown(values: Tree) -> list[Counter[str]]:
        about = Published("a/b", "m", "yopo", "npz", "linf", 0.1, ("c",), (1, 2, 2), values, None)
        claim = {"autoattack": plain["attacks"]["cw"], "clean": plain["attacks"]["cw"]}
        claimed = values | {"attacks": values["attacks"] | claim}
        body = model_card(about).split("---", 2)[2]
        return [*map(structure, (card.card(values), body, issue(PAPER, "net", saved, claimed)))]

    names = {("attacks", "pgd-40"), ("attacks", "cw", "after", "apgd-ce")}
    words = [(where, key) for where, key in walk(plain) if not key or where in names]
    assert len(words) > 15
    for where, key in words:
        assert shown(put(plain, ("eval.json", where, key), EVIL)) == shown(plain), where


def test_files_are_replaced_whole_and_not_followed(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    (tmp_path / ".file.writing").symlink_to(victim)
    file.symlink_to(victim)
    files.write_text(file, "new")
    assert (victim.read_text(), file.read_text()) == ("mine", "new")
    assert not file.is_symlink()
