"""A run as a claim for RobustBench's leaderboard: its JSON, network and weights in its names."""

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yopo.core import files
from yopo.core.words import fraction
from yopo.evaluation.card import card, one_line
from yopo.models import Normalize, PreActResNet
from yopo.runs.accuracies import evaluations
from yopo.runs.folder import check_writable, refuse_link
from yopo.runs.saved import Saved, find, load_images, load_model

RADII = {"linf": ("Linf", 8 / 255), "l2": ("L2", 0.5)}  # of its leaderboards for CIFAR-10
IMAGES = 10_000
STANDARD = "standard version"  # of AutoAttack, with nothing left out
NAME = re.compile("[A-Za-z][A-Za-z0-9_-]{0,79}")
SHAPE = (3, 32, 32)
ZOO = "robustbench.model_zoo.architectures"
NEAR = 1e-4  # of the largest logit
HEAD = '''"""{name}: {architecture} trained with {method}, written by yopo-torch."""

{imports}


class {kind}({base}):
    def __init__(self):
        super().__init__({arguments}){buffers}{forward}'''
BUFFERS = """
        self.register_buffer("mean", torch.tensor({mean}).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor({std}).view(1, 3, 1, 1))
"""
FORWARD = """
    def forward(self, x):
        return super().forward((x - self.mean) / self.std)
"""
ISSUE = """# {name}

## Paper

- Title: {title}
- Authors: {authors}
- Address: {link}
- Venue: {venue}

## Claim

| what | value |
|---|---|
| architecture | {architecture} |
| data set | CIFAR-10, all 10,000 test images |
| threat | {threat}, eps = {eps} |
| clean accuracy | {clean:.2%} |
| accuracy under AutoAttack (standard version) | {autoattack:.2%} |
| accuracy under the worst attack for each image | {worst:.2%} |
| data beyond CIFAR-10 | {additional} |
| passes for one prediction | 1 |

{warnings}

## For the model zoo

- `{name}.json` goes to `model_info/cifar10/{threat}/`.
- `{name}.py` has the network, on top of an architecture that is there already. Its entry in
  `robustbench/model_zoo/cifar10.py`, under {threat}:
  `("{name}", {{"model": {kind}, "gdrive_id": "..."}})`.
- `{name}.pt` has its weights, as a plain dictionary of tensors; put it where the entry can name it.
- The licence of the weights: ...

## How it was evaluated

{how}
"""


@dataclass(frozen=True, slots=True)
class Paper:
    """What a claim says of its origin, which no run knows."""

    name: str  # as Zhang2019You: who, when, the title's first word
    title: str  # of the paper
    authors: str  # in one line
    venue: str  # where it appeared
    link: str  # to it
    additional_data: bool = False  # trained on more than CIFAR-10


@dataclass(frozen=True, slots=True)
class Claim:
    """The folder that was written."""

    folder: Path
    entry: dict[str, Any]  # of the leaderboard
    compared: bool  # RobustBench's own network gave the same logits


@dataclass(frozen=True, slots=True)
class Translated:
    """A network of ours in RobustBench's words."""

    architecture: str  # as the leaderboard calls it
    module: str
    base: str  # a class there
    blocks: list[int] | None  # in each stage, where the class takes them, after its PreActBlock
    options: dict[str, Any]
    state: dict[str, Tensor]  # with mean and std where it normalises


def claim_run(
    run: Path,
    paper: Paper,
    out: Path | None = None,
    *,
    weights: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Claim:
    """Write what RobustBench's "New Model(s)" asks for, into `out`, by default `run`/robustbench.

    paper: where the network comes from. weights: "best" (default) or "last". say: hears what was
    written.

    Only for CIFAR-10, and only from an evaluation of these weights on the whole test set, with the
    whole of AutoAttack, at the leaderboard's own radius. A preactresnet18 or wideresnet is written
    in RobustBench's own classes; of other networks it has none.
    """
    if not NAME.fullmatch(paper.name):
        raise ValueError(f"expected --name as Zhang2019You, got {paper.name[:60]!r}")
    saved = find(run, weights)
    values = measured_as_asked(run, saved)
    images = load_images(saved)
    net = load_model(saved, images)
    there = translated(net, saved)
    if out is None:  # a name of ours in a folder that may be a stranger's
        refuse_link(out := (run if run.is_dir() else run.parent) / "robustbench")
    out.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    compared = same_there(net, there)
    entry = leaderboard_entry(paper, there.architecture, values)
    texts = {
        f"{paper.name}.json": json.dumps(entry, indent=2) + "\n",
        f"{paper.name}.py": source(paper.name, there, saved.config.method.name),
        "issue.md": issue(paper, there.architecture, saved, values),
    }
    for name, text in texts.items():
        files.write_text(out / name, text)
    with files.whole(weights_file := out / f"{paper.name}.pt") as writing:
        torch.save(there.state, writing)
    say(f"wrote {', '.join(sorted([*texts, weights_file.name]))} into {out}")
    return Claim(out, entry, compared)


def measured_as_asked(run: Path, saved: Saved) -> dict[str, Any]:
    """The newest evaluation that the leaderboard would take; else what it lacks."""
    config = saved.config
    threat, eps = RADII[config.threat.name]
    command = f"yopo eval {run} --attacks clean,autoattack --eps {fraction(eps)}"
    if config.data.name != "cifar10":
        raise ValueError(
            f"this run is on {config.data.name}; of RobustBench's boards yopo knows CIFAR-10's"
        )
    lacks = ["there is no evaluation of these weights"]
    for _, values in evaluations(run, saved):
        about, attack = values["about"], values["attacks"].get("autoattack")
        lacks = []
        if about["images"] != IMAGES:
            lacks.append(f"it is of {about['images']:,} images, not of all {IMAGES:,}")
        if attack is None or attack["settings"] != STANDARD:
            lacks.append("it has not the whole of AutoAttack")
        if abs(about["eps"] - eps) > 1e-9:
            lacks.append(
                f"its eps is {fraction(about['eps'])}, the {threat} board's {fraction(eps)}"
            )
        if about["precision"] != "float32":
            lacks.append(f"it is in {about['precision']}")
        if not lacks:
            return values
    raise ValueError(
        f"no evaluation of {run} is one that RobustBench takes: {'; '.join(lacks)}. Run `{command}`"
    )


def translated(net: nn.Module, saved: Saved) -> Translated:
    """The network in RobustBench's classes and names, or a sentence that it has none."""
    name, options, inner = saved.config.model.name, saved.config.model.options, net
    means = dict[str, Tensor]()
    if isinstance(net, nn.Sequential) and isinstance(first := net[0], Normalize):
        inner = net[1]
        means = {key: value.reshape(1, -1, 1, 1) for key, value in first.state_dict().items()}
    if not isinstance(inner, PreActResNet) or name not in ("preactresnet18", "wideresnet"):
        raise ValueError(
            f"RobustBench has no {name} as it is here, only preactresnet18 and wideresnet; for "
            "another network its issue wants a file of the architecture that you write yourself"
        )
    own, classes = inner.state_dict(), inner.linear.out_features
    if name == "wideresnet":
        sizes = {"depth": options.get("depth", 34), "widen_factor": options.get("width", 10)}
        return Translated(
            architecture=f"WideResNet-{sizes['depth']}-{sizes['widen_factor']}",
            module=f"{ZOO}.wide_resnet",
            base="WideResNet",
            blocks=None,
            options={**sizes, "num_classes": classes},
            state={_wide(key): tensor for key, tensor in own.items()} | means,
        )
    blocks, width = list(options.get("blocks", (2, 2, 2, 2))), options.get("width", 64)
    if width != 64 or len(blocks) != 4:
        raise ValueError(
            "RobustBench's PreActResNet has 64 filters and four stages; this one has "
            f"{width} and {len(blocks)}"
        )
    usual = blocks == [2, 2, 2, 2]
    return Translated(
        architecture="PreActResNet-18" if usual else f"PreActResNet, blocks {blocks}",
        module=f"{ZOO}.resnet",
        base="PreActResNet",
        blocks=blocks,
        options={
            "num_classes": classes,
            "bn_before_fc": inner.bn is not None,
            "out_shortcut": True,
        },
        state={key.replace("shortcut.", "shortcut.0."): t for key, t in own.items()} | means,
    )


def _wide(name: str) -> str:
    """layer1.0.shortcut.weight as block1.layer.0.convShortcut.weight."""
    name = re.sub(r"^layer(\d)\.", r"block\1.layer.", name)
    name = re.sub("^bn[.]", "bn1.", name.replace("shortcut.", "convShortcut."))
    return re.sub("^linear[.]", "fc.", name)


def source(name: str, there: Translated, method: str) -> str:
    """The file of the architecture."""
    numbers = {
        key: [round(float(value), 8) for value in there.state[key].flatten()]
        for key in ("mean", "std")
        if key in there.state
    }
    imported = there.base if there.blocks is None else f"PreActBlock, {there.base}"
    lines = [*["import torch"] * bool(numbers), f"from {there.module} import {imported}"]
    first = [] if there.blocks is None else ["PreActBlock", str(there.blocks)]
    given = [*first, *(f"{key}={value!r}" for key, value in there.options.items())]
    text = HEAD.format(
        name=name,
        architecture=there.architecture,
        method=method,
        imports="\n".join(lines),
        kind=_kind(name),
        base=there.base,
        arguments=", ".join(given),
        buffers=BUFFERS.format(**numbers) if numbers else "",
        forward=FORWARD if numbers else "",
    )
    return text.rstrip() + "\n"


def _kind(name: str) -> str:
    return re.sub("[^A-Za-z0-9_]", "_", name) + "Net"


def leaderboard_entry(paper: Paper, architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a file in RobustBench's model_info; percentages are texts there."""
    attacks, eps = values["attacks"], values["about"]["eps"]
    return {
        "link": paper.link,
        "name": paper.title,
        "authors": paper.authors,
        "additional_data": paper.additional_data,
        "number_forward_passes": 1,
        "dataset": "cifar10",
        "venue": paper.venue,
        "architecture": architecture,
        "eps": fraction(eps),
        "clean_acc": _percent(attacks["clean"]["accuracy"]),
        "reported": _percent(values["worst"]["accuracy"]),
        "autoattack_acc": _percent(attacks["autoattack"]["accuracy"]),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def issue(paper: Paper, architecture: str, saved: Saved, values: dict[str, Any]) -> str:
    """What to write into the issue that adds a model."""
    attacks = values["attacks"]
    doubts = [f"- {one_line(w['code'])}: {one_line(w['text'])}" for w in values["warnings"]]
    return ISSUE.format(
        name=paper.name,
        kind=_kind(paper.name),
        title=paper.title,
        authors=paper.authors,
        link=paper.link,
        venue=paper.venue,
        architecture=architecture,
        threat=RADII[saved.config.threat.name][0],
        eps=fraction(values["about"]["eps"]),
        clean=attacks["clean"]["accuracy"],
        autoattack=attacks["autoattack"]["accuracy"],
        worst=values["worst"]["accuracy"],
        additional="yes" if paper.additional_data else "no",
        warnings="\n".join(["What the evaluation warned of:", "", *doubts])
        if doubts
        else "The evaluation warned of nothing.",
        how=card(values).rstrip(),
    )


def same_there(net: nn.Module, there: Translated) -> bool:
    """Whether RobustBench's own network gives the same logits; False where it is not installed."""
    try:
        module: Any = importlib.import_module(there.module)
    except Exception:  # its package imports much that may be missing or broken
        return False
    first = () if there.blocks is None else (module.PreActBlock, there.blocks)
    theirs = getattr(module, there.base)(*first, **there.options).eval()
    means = [there.state[key] for key in ("mean", "std") if key in there.state]
    theirs.load_state_dict({k: t for k, t in there.state.items() if k not in ("mean", "std")})
    x = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, other = net(x), theirs((x - means[0]) / means[1] if means else x)
    difference = float((mine - other).abs().max())
    if not difference <= NEAR * max(1.0, float(mine.abs().max())):
        raise RuntimeError(
            f"RobustBench's network answers otherwise: a logit differs by {difference:.2g}; "
            "nothing was written"
        )
    return True
