"""Hostile run folders and weights files: `tools.hostile` lets every command meet each of them."""

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from tests.fuzzing import ODD_NAMES, OTHER_KINDS, archive_bombs
from tests.hostile import EXAMPLES, HOSTILE, load, places, put, save, write_full_run
from tests.published import write_evaluation, write_network
from yopo.core import seals, tensor_files
from yopo.models import SmallCNN
from yopo.runs.overlay import Tree, overlay
from yopo.runs.settings import validate

RUN = "yopo-5-3-seed-0"  # a name that `yopo reproduce --show` looks for
OURS: Tree = {"name": "smallcnn", "options": {"width": 2, "hidden": 4}}
STEER = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e[red]a[/red][link=http://x]"
Make = Callable[[Path], Path]  # fills a case's folder; what to give to the commands
TIMM = """
import pathlib, torch
def create_model(name, **options):
    plain = name.replace("_", "").replace(".", "").isalnum()
    if not plain or {*options} - {"num_classes", "in_chans", "drop_rate"}:
        pathlib.Path("ran").write_text(f"timm was asked for {name} {options}")
    layers = [torch.nn.Linear(1000, 1000) for _ in range(100_000 if "huge" in name else 1)]
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)
def is_model(name):
    return True
def list_models():
    return ["resnet18"]
"""
HUB = """
import pathlib, shutil, types
class CommitOperationAdd:
    def __init__(self, name, path):
        self.name, self.path = name, path
class HfApi:
    def __init__(self, **_):
        pass
    def create_repo(self, *_, **__):
        pass
    def create_commit(self, repo, files, **_):
        for file in files:
            target = pathlib.Path("sent") / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.path, target)
        return types.SimpleNamespace(commit_url="https://hub/commit")
"""
WANDB = """
import pathlib, types
def init(dir, id=None, **_):
    pathlib.Path(dir, "log").write_text("a log")
    if id is not None:
        pathlib.Path("misled").write_text(id)
    nothing = lambda *_, **__: None
    return types.SimpleNamespace(
        id="mine", summary={}, define_metric=nothing, log=nothing, finish=nothing
    )
def Image(pixels):
    return pixels
"""
PACKAGES = {"timm": TIMM, "huggingface_hub": HUB, "wandb": WANDB}  # instead of those of that name
EVIL = "import pathlib\npathlib.Path('ran').touch()\ndef build(**_):\n    pass\n"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) (w) file\n%%EOF\n"


class Touch:
    """Whoever unpickles it makes the file `ran`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def run(case: Path, model: Tree | None = None, over: Tree | None = None) -> Path:
    """A run that is whole but for its settings, with an evaluation and pictures."""
    folder = write_full_run(case / RUN)
    tree = overlay(validate({"model": OURS, "threat": {"eps": 0.1}}).tree(), over or {})
    tree["model"] |= {"options": {}} | model if model else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    weights(folder, tree)
    return folder


def spoilt(how: Callable[..., object], **given: object) -> Make:
    """A run with something done to its folder."""

    def make(case: Path) -> Path:
        folder = run(case)
        how(folder, **given)
        return folder

    return make


def beside(case: Path, how: Callable[[Path], object]) -> Path:
    """A run beside which something lies."""
    how(case)
    return run(case)


def renamed(case: Path, name: str, file: str = "") -> Path:
    """A run, or one file of it, under another name."""
    return (run(case) / file).rename(case / name)


def weights(folder: Path, tree: object, classes: int = 10, channels: int = 1) -> None:
    """Weights of our network, and what their metadata say."""
    state = dict(SmallCNN(classes, channels=channels, width=2, hidden=4).state_dict())
    for name in ("model.safetensors", "model-last.safetensors"):
        tensor_files.save_weights(folder / name, state, {"config": json.dumps(tree)})


# ---------------------------------------------------------------- the cases


def code() -> Iterator[tuple[str, Make]]:
    """Functions that are not networks."""
    named: list[tuple[str, Tree]] = [
        ("os:system", {"command": "touch ran"}),
        ("os:popen", {"cmd": "touch ran"}),
        ("posix:system", {"command": "touch ran"}),
        ("subprocess:run", {"args": ["touch", "ran"]}),
        ("subprocess:getoutput", {"cmd": "touch ran"}),
        ("builtins:exec", {"source": "open('ran', 'w')"}),
        ("builtins:eval", {"source": "open('ran', 'w')"}),
        ("builtins:open", {"file": "ran", "mode": "w"}),
        ("builtins:__import__", {"name": "evil"}),
        ("importlib:import_module", {"name": "evil"}),
        ("runpy:run_path", {"path_name": "evil.py"}),
        ("evil:build", {}),
        ("evil.build:", {}),
        ("./evil.py:build", {}),
        (f"{RUN}.evil:build", {}),
        ("pickle:loads", {"data": "cos\nsystem\n(S'touch ran'\ntR."}),
        ("torch:load", {"f": "evil.pt", "weights_only": False}),
        ("torch.hub:load", {"repo_or_dir": ".", "model": "x", "source": "local"}),
        ("torch.hub:load_state_dict_from_url", {"url": "http://127.0.0.1:9/x"}),
        ("urllib.request:urlopen", {"url": "http://127.0.0.1:9/x"}),
        ("webbrowser:open", {"url": "http://127.0.0.1:9/x"}),
        ("shutil:rmtree", {"path": "victim"}),
        ("pty:spawn", {"argv": ["touch", "ran"]}),
        ("ctypes:CDLL", {"name": "evil.so"}),
        ("yopo.models:SmallCNN", {}),
        (" os:system", {"command": "touch ran"}),
    ]
    for name, options in named:
        yield f"model {name}", partial(run, model={"name": name, "options": options})

    for name, options in named[:4] + named[11:13]:
        data: Tree = {"data": {"name": name, "options": options}}
        yield f"data {name}", partial(run, over=data)

    def by_file(case: Path) -> Path:
        folder = run(case, {"name": "os:system", "options": {"command": "touch ran"}})
        return (folder / "model.safetensors").rename(case / "net.safetensors")

    yield "metadata os:system", by_file
    tag = "!!python/object/apply:os.system [touch ran]"
    yield "YAML tag", spoilt(text, name="config.yaml", words=f"notes: {tag}\n")
    yield (
        "YAML tag in an option",
        partial(run, model={"name": "smallcnn", "options": {"width": tag}}),
    )


def timm() -> Iterator[tuple[str, Make]]:
    """timm with addresses, paths and more."""
    names = "hf-hub:a/b hf_hub:a/b local-dir:/x /etc/passwd ../x https://127.0.0.1:9/x timm/x huge"
    for name in names.split():
        yield f"timm:{name}", partial(run, model={"name": f"timm:{name}"})
    options: list[Tree] = [
        {"checkpoint_path": "evil.pt"},
        {"pretrained": True},
        {"pretrained_cfg": {"url": "http://127.0.0.1:9/x"}},
        {"pretrained_cfg_overlay": {"file": "evil.pt"}},
        {"cache_dir": "/"},
        {"scriptable": True},
        {"features_only": True},
        {"global_pool": "http://127.0.0.1:9/x"},
        {"img_size": 10**9},
        {"num_classes": [10**5] * 16},
    ]
    for given in options:
        yield (
            f"timm with {next(iter(given))}",
            partial(run, model={"name": "timm:resnet18", "options": given}),
        )


def sizes() -> Iterator[tuple[str, Make]]:
    """Networks of absurd size, and options of another kind."""
    found: list[tuple[str, Tree]] = [
        ("smallcnn", {"width": 10**9}),
        ("smallcnn", {"width": 999_999}),
        ("smallcnn", {"hidden": 10**6}),
        ("smallcnn", {"size": 10**6}),
        ("smallcnn", {"width": -1}),
        ("smallcnn", {"width": 0}),
        ("smallcnn", {"width": "a"}),
        ("smallcnn", {"width": 1.5}),
        ("smallcnn", {"dropout": 9}),
        ("smallcnn", {"classes": 3}),
        ("preactresnet18", {"blocks": [10**6]}),
        ("preactresnet18", {"blocks": [1] * 16}),
        ("preactresnet18", {"blocks": {"a": 1}}),
        ("wideresnet", {"depth": 600_004}),
        ("wideresnet", {"depth": 10, "width": 10**5}),
    ]
    for name, options in found:
        words = json.dumps(options)
        yield f"{name} {words}", partial(run, model={"name": name, "options": options})


def weights_files() -> Iterator[tuple[str, Make]]:
    """Files named .safetensors that are none."""

    def content(data: bytes) -> Make:
        return spoilt(binary, name="model.safetensors", content=data)

    zipped = io.BytesIO()
    torch.save({"w": Touch()}, zipped)
    yield "pickle", content(pickle.dumps(Touch()))
    yield "pickle of protocol 0", content(pickle.dumps(Touch(), 0))
    yield "torch.save", content(zipped.getvalue())
    yield "empty weights", content(b"")
    yield "header of 2^60 bytes", content(struct.pack("<Q", 2**60) + b"{}")
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield "deep header", content(struct.pack("<Q", len(deep)) + deep)
    for name, tree in (("list", []), ("null", None), ("words", "os:system"), ("number", 10**30)):
        yield f"metadata {name}", spoilt(weights, tree=tree)
    yield "weights from a pipe", spoilt(pipe, name="model.safetensors")
    yield "weights of /dev/zero", spoilt(link, name="model.safetensors", target="/dev/zero")
    yield "weights of /etc/passwd", spoilt(link, name="model.safetensors", target="/etc/passwd")
    yield "tensors with steering names", spoilt(named_tensors)


def settings_files() -> Iterator[tuple[str, Make]]:
    """Settings and records of other kinds."""
    yield "settings from a pipe", spoilt(pipe, name="config.yaml")
    yield "settings of /etc/passwd", spoilt(link, name="config.yaml", target="/etc/passwd")
    yield "settings of /dev/zero", spoilt(link, name="config.yaml", target="/dev/zero")
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    yield "alias bomb", spoilt(text, name="config.yaml", words="\n".join(lines))
    inner = "[&a [1,1,1,1,1,1,1,1,1]"
    for i in range(12):
        inner += f", &{'bcdefghijklm'[i]} [{','.join(['*' + 'abcdefghijkl'[i]] * 9)}]"
    bomb: Tree = {"name": "smallcnn", "options": {"width": inner + "]"}}
    yield "alias bomb in an option", partial(run, model=bomb)
    yield "deep settings", spoilt(text, name="config.yaml", words="[" * 10**5)
    for file in ("eval.json", "result.json", "metrics.jsonl", EXAMPLES):
        yield f"{file} from a pipe", spoilt(pipe, name=file)
        yield f"{file} of /dev/zero", spoilt(link, name=file, target="/dev/zero")
    yield "pickled examples", spoilt(binary, name=EXAMPLES, content=pickle.dumps(Touch()))
    yield "huge examples", huge_examples
    yield "names of classes as a bomb", spoilt(examples, facts={"names": "[" * 10**5})


def data() -> Iterator[tuple[str, Make]]:
    """Data that a run names."""

    for place in ("https://127.0.0.1:9/x", "//127.0.0.1/x", "/dev/zero", "pipe", "~root/x"):
        yield f"data of {place}", partial(run, over={"data": {"name": "npz", "path": place}})
    yield "pickled data", pickled_npz
    yield "data that unpack to 8 GB", bomb_npz
    yield "data evil:load", partial(run, over={"data": {"name": "evil:load"}})
    yield "pickled batches", pickled_batches
    yield "EPS named PNG", eps_pictures
    for side in (10**9, 20_000, 3_000):
        for resident in (None, False, True):
            over: Tree = {"size": side, "resident": resident}
            yield f"pictures of side {side}, resident {resident}", partial(grey_pictures, over=over)
    for kept in (False, True):
        over = {"workers": 500, "resident": kept}
        yield f"500 processes, resident {kept}", partial(grey_pictures, over=over)
    yield "classes with hostile names", hostile_classes


def links() -> Iterator[tuple[str, Make]]:
    """Links to files and folders of the user's, where something is to be written."""
    written = ["eval.json", "eval.md", "diagnose.json", "diagnose.png", EXAMPLES, "config.yaml"]
    written += ["model.pt2", "tracking.json", "model.eval.json"]
    for name in (*written, *(f".{name}.writing" for name in written), "eval-state", "state"):
        yield f"{name} is a link", partial(linked, name=name)
    for name in ("eval-state", "state", "robustbench", "wandb", "model.tracked", "figures"):
        yield f"{name} is a link to a folder", partial(linked, name=name, target="../victim")
    yield (
        "net.tracked is a link to a folder",
        lambda case: (
            link(
                renamed(case, "net.safetensors", "model.safetensors").parent,
                "net.tracked",
                "victim",
            )
            / "net.safetensors"
        ),
    )
    for name in ("accuracy-time.png", "accuracy-propagations.svg"):
        yield f"figures/{name} is a link", partial(beside, how=partial(figures, name=name))


def figures(case: Path, name: str) -> None:
    """A folder of that name, with a link in it."""
    (case / "figures").mkdir()
    link(case / "figures", name, "../victim/file")


def linked(case: Path, name: str, target: str = "../victim/file") -> Path:
    """A run in which one name leads to the user's own file or folder."""
    folder = run(case)
    return folder if name == "config.yaml" else link(folder, name, target)


def foreign() -> Iterator[tuple[str, Make]]:
    """Weights files that no run of ours made."""
    own = dict(SmallCNN(width=2, hidden=4).state_dict())
    first = own["conv1.weight"]
    cycle: dict[str, Any] = {"epoch": 3}
    cycle["model"] = {"state_dict": cycle}
    for kind, other in OTHER_KINDS.items():
        if kind != "nested":
            yield f"foreign {kind}", partial(saved, tree=own | {"conv1.weight": other(first)})
    for name in ODD_NAMES:
        yield f"foreign name {name!r:.20}", partial(saved, tree=dict[Any, Any](own) | {name: first})
    yield "foreign cycle", partial(saved, tree=cycle)
    yield "foreign pickle", partial(saved, tree={"model": Touch()})
    yield "foreign list", partial(saved, tree=[first])
    yield "foreign, empty", partial(saved, tree={})
    yield (
        "foreign, as another class has it",
        partial(saved, tree={"layer1.0.shortcut.0.weight": first}),
    )
    for number, bomb in enumerate(archive_bombs(1000)):
        yield f"foreign bomb {number}", partial(named, content=bomb)
    yield "foreign old pickle", lambda case: binary(case, "x.pt", pickle.dumps(Touch(), 0)) / "x.pt"


def saved(case: Path, tree: object) -> Path:
    """A file of torch.save's."""
    torch.save(tree, case / "x.pt")
    return case / "x.pt"


def named(case: Path, content: bytes) -> Path:
    """A file of that content."""
    return binary(case, "x.pt", content) / "x.pt"


def claims() -> Iterator[tuple[str, Make]]:
    """Runs that RobustBench would take."""
    yield "claim", claim
    yield "claim into a link", lambda case: link(claim(case), "robustbench", "../victim")
    for name in ("issue.md", "A2026B.pt", "A2026B.json", ".issue.md.writing"):
        yield f"claim with {name} a link", partial(claim, linked=name)
    for i, evil in enumerate((*HOSTILE, STEER)):
        yield f"claim with words {i}", partial(claim, evil=evil)


def claim(case: Path, evil: str = "", linked: str = "") -> Path:
    """A small network, evaluated as the leaderboard wants it."""
    folder = case / RUN
    write_evaluation(folder, write_network(folder, "wideresnet", data={"name": "cifar10"}))
    if evil:
        values = seals.read_json(folder / "eval.json")
        values["warnings"] = [{"code": evil, "text": evil}]
        for key in ("model", "data", "threat", "hardware", "packages", "finished"):
            values["about"][key] = evil
        (folder / "eval.json").write_text(json.dumps(values))
    if linked:
        (folder / "robustbench").mkdir()
        link(folder / "robustbench", linked, "../../victim/file")
    return folder


def tracked() -> Iterator[tuple[str, Make]]:
    """Notes of trackers that name another's run."""
    note: Tree = {"trackers": {"wandb": {"id": "another's", "step": 1}}}
    for name, more in (("", {}), (", as if made here", {"made_here": "0" * 64})):
        tree = note | more
        yield (
            f"tracked elsewhere{name}",
            spoilt(
                lambda folder, tree: seals.write_json(folder / "tracking.json", tree), tree=tree
            ),
        )
    values: tuple[Any, ...] = (None, [], {"wandb": 3}, {"wandb": {"id": STEER}})
    for value in values:
        yield (
            f"tracked {str(value)[:20]}",
            spoilt(text, name="tracking.json", words=json.dumps({"trackers": value})),
        )


def words() -> Iterator[tuple[str, Make]]:
    """Names with markup, and such as steer a terminal."""
    plain = STEER.replace("/", "\u2215")
    for i, evil in enumerate((*HOSTILE, STEER)):
        name = evil.replace("/", "\u2215").replace("\x00", "")
        yield f"folder named {i}", partial(renamed, name=name)
        yield f"all words {i}", spoilt(all_words, evil=evil)
    yield "folder of no UTF-8", partial(renamed, name=os.fsdecode(b"run\xff\xfe"))
    yield "weights named", partial(renamed, name=f"{plain}.st", file="model.safetensors")


def git() -> Iterator[tuple[str, Make]]:
    """A working directory whose git settings run something, or lead elsewhere."""
    keys = ["core.fsmonitor", "core.sshCommand", "core.pager", "diff.external", "filter.evil.clean"]
    for key in (*keys, "diff.evil.textconv", "alias.status", "credential.helper"):
        yield f"git {key}", partial(repository, key=key)
    yield "git hooks", partial(repository, key="core.hooksPath")
    yield ".git is a pipe", partial(beside, how=lambda case: os.mkfifo(case / ".git"))
    yield ".git leads out", partial(beside, how=partial(text, name=".git", words="gitdir: /etc"))
    zero = partial(link, name=".git", target="/dev/zero")
    yield ".git of /dev/zero", partial(beside, how=zero)


def states() -> Iterator[tuple[str, Make]]:
    """Checkpoints, which `yopo train --resume` reads."""
    yield "pickled checkpoint", partial(checkpointed, tensors=pickle.dumps(Touch()), values="{}")
    yield "checkpoint of lists", partial(checkpointed, values="[]")
    yield "checkpoint of hostile words", partial(checkpointed, values=json.dumps({"a": STEER}))


GROUPS = (
    *(code, timm, sizes, weights_files, settings_files, foreign, data),
    *(links, words, git, states, claims, tracked),
)


# ---------------------------------------------------------------- what they are made of


def text(folder: Path, name: str, words: str) -> Path:
    """With another file of text."""
    (folder / name).write_text(words)
    return folder


def binary(folder: Path, name: str, content: bytes) -> Path:
    """With another file."""
    (folder / name).write_bytes(content)
    return folder


def pipe(folder: Path, name: str) -> Path:
    """With a pipe, which whoever opens waits for."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    return folder


def link(folder: Path, name: str, target: str) -> Path:
    """With a link."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    return folder


def examples(folder: Path, facts: dict[str, str]) -> Path:
    """With other words beside the pictures."""
    file = folder / EXAMPLES
    tensor_files.save_weights(file, tensor_files.load_weights(file), facts)
    return folder


def huge_examples(case: Path) -> Path:
    """Pictures of a wild shape."""
    folder = run(case)
    tensors = tensor_files.load_weights(folder / EXAMPLES)
    tensors["cw.images"] = torch.zeros(9, 1, 1, 10**5)
    tensor_files.save_weights(folder / EXAMPLES, tensors, {})
    return folder


def named_tensors(folder: Path) -> Path:
    """Weights whose names steer."""
    tree = load(folder / "config.yaml")
    state = {f"{STEER}{i}": torch.zeros(100) for i in range(3)}
    state |= {f"pad{i}": torch.zeros(100) for i in range(40)}
    tensor_files.save_weights(folder / "model.safetensors", state, {"config": json.dumps(tree)})
    return folder


def all_words(folder: Path, evil: str) -> Path:
    """Every word of the records hostile that may be any."""
    for place in list(places(folder)):
        if place[0] != "config.yaml" and not place[2]:
            save(folder / place[0], put(load(folder / place[0]), place, evil))
    return examples(folder, {"names": json.dumps([evil] * 9)})


def pickled_npz(case: Path) -> Path:
    """Arrays of objects."""
    objects = np.array([Touch()], dtype=object)
    keys = ("x_train", "y_train", "x_test", "y_test")
    np.savez(case / "x.npz", allow_pickle=True, **dict.fromkeys(keys, objects))
    return run(case, over={"data": {"name": "npz", "path": "x.npz"}})


def bomb_npz(case: Path) -> Path:
    """Zeros, packed."""
    with zipfile.ZipFile(case / "x.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            with packed.open(f"{key}.npy", "w") as stream:
                header = {"descr": "|u1", "fortran_order": False, "shape": (2**31, 1, 1)}
                np.lib.format.write_array_header_1_0(stream, header)
                for _ in range(32):
                    stream.write(bytes(2**20))
    return run(case, over={"data": {"name": "npz", "path": "x.npz"}})


def pickled_batches(case: Path) -> Path:
    """CIFAR-10's own layout, with a command in it."""
    folder = case / "cifar" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": Touch(), "labels": []}))
    return run(case, over={"data": {"name": "cifar10", "root": "cifar"}})


def pictures(case: Path, names: list[str], content: bytes, over: Tree | None = None) -> Path:
    """A folder of pictures, five of each class."""
    for split in ("train", "test"):
        for name in names:
            (case / "photos" / split / name).mkdir(parents=True)
            for k in range(5):
                (case / "photos" / split / name / f"{k}.png").write_bytes(content)
    data = {"name": "folder", "root": "photos", "size": 28} | (over or {})
    folder = run(case, over={"data": data})
    weights(folder, load(folder / "config.yaml"), len(names), channels=3)
    return folder


def eps_pictures(case: Path) -> Path:
    """PostScript, for which pillow would start Ghostscript."""
    return pictures(case, ["a", "b"], EPS)


def grey_pictures(case: Path, over: Tree) -> Path:
    """Sound ones, with settings of how they are read."""
    return pictures(case, ["a", "b"], grey(), over)


def hostile_classes(case: Path) -> Path:
    """Classes whose names are hostile."""
    return pictures(case, ["<img src=x onerror=ran=1>", STEER.replace("/", "")], grey())


def grey() -> bytes:
    """A picture."""
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28), (99, 99, 99)).save(buffer, "PNG")
    return buffer.getvalue()


def repository(case: Path, key: str) -> Path:
    """The case's folder as a repository with one hostile setting."""
    home = os.environ | {"HOME": str(case), "GIT_CONFIG_NOSYSTEM": "1"}
    script = case / "evil.sh"
    script.write_text("#!/bin/sh\ntouch ran\n")
    script.chmod(0o755)
    (case / "hooks").mkdir()
    for hook in ("post-index-change", "fsmonitor-watchman"):
        shutil.copy(script, case / "hooks" / hook)
    (case / "tracked").write_text("1")
    (case / ".gitattributes").write_text("tracked filter=evil diff=evil\n")
    value = str(case / "hooks") if key == "core.hooksPath" else str(script)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for line in (
        ["init", "-q"],
        ["add", "tracked"],
        ["commit", "-qm", "1"],
        ["config", key, value],
    ):
        subprocess.run(["git", *who, *line], cwd=case, env=home, check=True, capture_output=True)
    (case / "tracked").write_text("2")
    return run(case)


def checkpointed(case: Path, tensors: bytes = b"", values: str = "{}") -> Path:
    """A run with a checkpoint whose checksums agree."""
    import hashlib

    folder = run(case)
    at = folder / "state" / "save-000001"
    at.mkdir(parents=True)
    if not tensors:
        shutil.copy(folder / "model.safetensors", at / "tensors.safetensors")
        tensors = (at / "tensors.safetensors").read_bytes()
    (at / "tensors.safetensors").write_bytes(tensors)
    (at / "values.json").write_text(values)
    seal = {"tensors": hashlib.sha256(tensors).hexdigest()}
    seal["values"] = hashlib.sha256(values.encode()).hexdigest()
    (at / "seal.json").write_text(json.dumps(seal))
    return folder
