"""A model card for the Hugging Face Hub: what was measured, as YAML for its pages, and in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yopo.core.words import fraction
from yopo.evaluation.card import attacked, card, one_line

LIBRARY = "yopo-torch"
DATA_SETS = {  # as the Hub calls them: repository, name
    "mnist": ("ylecun/mnist", "MNIST"),
    "mnist-subset": ("ylecun/mnist", "MNIST (2,000 of its test images, those in yopo-torch)"),
    "cifar10": ("uoft-cs/cifar10", "CIFAR-10"),
}
USE = """```python
import yopo

net = yopo.load("hf:{repo}"{more})  # images in [0, 1] to logits; the normalisation is inside
net.class_names, net.image_shape
```"""


@dataclass(frozen=True, slots=True)
class Published:
    """A network that is published, in words and numbers."""

    repo: str  # ORG/NAME
    model: str
    method: str
    data: str
    threat: str  # "linf" or "l2"
    eps: float
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    evaluation: Mapping[str, Any] | None  # the values of `Result.to_dict`
    own: Mapping[str, float] | None  # where there is none: what its training measured


def model_card(about: Published) -> str:
    """README.md of its repository."""
    import yaml

    header = yaml.safe_dump(metadata(about), sort_keys=False, allow_unicode=True, width=1000)
    code = about.model if ":" in about.model and not about.model.startswith("timm:") else None
    more = f', model_name="{code}"' if code else ""
    channels, height, width = about.shape
    lines = [
        "---",
        header.rstrip(),
        "---",
        "",
        f"# {one_line(about.repo.partition('/')[2])}",
        "",
        f"{one_line(about.model)}, trained with {one_line(about.method)} on "
        f"{one_line(about.data)} to hold under attacks in {_ball(about)}.",
        f"It takes images of {width}x{height} pixels in {channels} "
        f"channel{'s' if channels > 1 else ''}, and has {len(about.classes)} classes"
        f"{_some(about.classes)}.",
        "",
        USE.format(repo=about.repo, more=more),
        "",
        "`pip install 'yopo-torch[hub]'` brings what this needs. `yopo eval hf:"
        f"{about.repo}` attacks it again.",
    ]
    if code:
        lines += ["", f"The network itself is code of its author's, `{one_line(code)}`: not here."]
    if about.evaluation is not None:
        lines += ["", "## Evaluation", "", card(about.evaluation).rstrip()]
    else:
        lines += ["", "## Not evaluated", "", _unmeasured(about.own)]
    return "\n".join(lines) + "\n"


def metadata(about: Published) -> dict[str, Any]:
    """The header, in the Hub's words: one metric for each attack, with its settings."""
    data_set, named = DATA_SETS.get(about.data, (None, one_line(about.data)))
    tags = ["adversarial-training", "adversarial-robustness", about.threat, about.method]
    head: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "image-classification",
        "tags": list(dict.fromkeys(one_line(tag) for tag in tags)),
    }
    if data_set is not None:
        head["datasets"] = [data_set]
    if (values := about.evaluation) is None:
        return head
    measured, metrics = values["about"], []
    for name, attack in values["attacks"].items():
        args = {"interval_95": attack["interval"]}
        if name != "clean":
            args |= {"threat": measured["threat"], "eps": measured["eps"]}
            args |= {"settings": attack["settings"]}
        title = "accuracy" if name == "clean" else f"robust accuracy under {one_line(name)}"
        metrics.append(_metric(title, attack["accuracy"], args))
    if attacked(values["attacks"]):
        worst, ball = values["worst"], {k: measured[k] for k in ("threat", "eps")}
        title = "robust accuracy, worst case of each image"
        args = {"interval_95": worst["interval"]} | ball
        metrics.append(_metric(title, worst["accuracy"], args))
    head["model-index"] = [
        {
            "name": about.repo.partition("/")[2],
            "results": [
                {
                    "task": {"type": "image-classification", "name": "Image classification"},
                    "dataset": {
                        "type": data_set or "custom",
                        "name": named,
                        "split": "test",
                        "args": {"images": measured["images"]},
                    },
                    "metrics": metrics,
                }
            ],
        }
    ]
    return head


def _metric(name: str, value: float, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "accuracy", "name": name, "value": value, "args": dict(args)}


def _ball(about: Published) -> str:
    """ "an L∞ ball of radius 8/255" """
    return f"an {'L∞' if about.threat == 'linf' else 'L2'} ball of radius {fraction(about.eps)}"


def _some(classes: tuple[str, ...]) -> str:
    """Their names, as far as a sentence bears them."""
    few = ", ".join(map(one_line, classes[:12]))
    return f": {few}" + (f" and {len(classes) - 12} more" if len(classes) > 12 else "")


def _unmeasured(own: Mapping[str, float] | None) -> str:
    first = "No evaluation of these weights is published with them."
    if not own:
        return first
    shares = ", ".join(f"{one_line(name)} {share:.2%}" for name, share in own.items())
    return f"{first} Its training measured {shares}, with an attack that is too weak to rely on."
