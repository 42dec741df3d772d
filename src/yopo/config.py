"""What a run is made of, as typed values: recipes, YAML files and flags all become a Config."""

import difflib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
)

Tree = dict[str, Any]  # nested: {"method": {"name": "yopo", "m": 5}, "epochs": 40}


def fraction(text: str, name: str) -> float:
    """ "0.3", "8/255" or "2.5/255" as a number; `name` is what it is for."""
    parts = text.replace(" ", "").split("/")
    try:
        above, below = parts if len(parts) > 1 else (text, "1")
        return float(Fraction(above) / Fraction(below))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"expected a number for {name}, as 0.3 or 8/255, got {text!r}") from None


def _number(value: object) -> object:
    """Let "8/255" be a number."""
    if isinstance(value, str) and "/" in value:
        try:
            return fraction(value, "a setting")
        except ValueError:
            return value  # pydantic says what is wrong with it
    return value


def _options(value: object) -> object:
    """Let options given as words be what YAML takes them for."""
    if not isinstance(value, Mapping):
        raise ValueError("expected one by one, as --model.options.width 16")
    try:
        return {k: _value(v) if isinstance(v, str) else v for k, v in value.items()}
    except yaml.YAMLError:
        raise ValueError("options should be values as in YAML") from None


def _value(word: str) -> object:
    """As YAML, which takes 1e-3 for a word, and as Python."""
    value = yaml.safe_load(word)
    try:
        return float(word) if isinstance(value, str) else value
    except ValueError:
        return value


def _list(value: object) -> object:
    """Let "30,36" be a list, and "[30, 36]" as config.yaml has it; "[]" is an empty one."""
    if not isinstance(value, str):
        return value
    words = [word.strip() for word in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return words if any(words) else []


Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Part = Annotated[float, Field(ge=0, lt=1)]
Epochs = Annotated[list[NotNegative], BeforeValidator(_list)]
Names = Annotated[list[str], BeforeValidator(_list)]
Options = Annotated[dict[str, Any], BeforeValidator(_options)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinfConfig(_Strict):
    """The L∞ ball."""

    name: Literal["linf"] = "linf"
    eps: Positive = 8 / 255
    step: Positive | None = Field(None, description="of one ascent step; eps/4 by default")


class L2Config(_Strict):
    """The L2 ball."""

    name: Literal["l2"] = "l2"
    eps: Positive = 0.5
    step: Positive | None = Field(None, description="of one ascent step; eps/4 by default")


class NaturalConfig(_Strict):
    """No adversary."""

    name: Literal["natural"] = "natural"


class PGDConfig(_Strict):
    """PGD-r."""

    name: Literal["pgd"] = "pgd"
    steps: Count = 10
    attack_mode: Literal["eval", "train"] = "eval"


class FreeConfig(_Strict):
    """Free-m."""

    name: Literal["free"] = "free"
    m: Count = 8
    step: Positive | None = Field(None, description="of the adversary; eps by default")


class FastConfig(_Strict):
    """FGSM-RS."""

    name: Literal["fast"] = "fast"
    step: Positive | None = Field(None, description="1.25·eps by default")
    attack_mode: Literal["eval", "train"] = "train"


class NFGSMConfig(_Strict):
    """N-FGSM."""

    name: Literal["nfgsm"] = "nfgsm"
    noise: Positive = Field(2.0, description="radius of the noise, in eps")
    step: Positive | None = Field(None, description="eps by default")
    attack_mode: Literal["eval", "train"] = "train"


class TRADESConfig(_Strict):
    """TRADES-r."""

    name: Literal["trades"] = "trades"
    steps: Count = 10
    beta: NotNegative = Field(6.0, description="weight of the consistency, the paper's 1/λ")
    attack_mode: Literal["eval", "train"] = "eval"


class YOPOConfig(_Strict):
    """YOPO-m-n."""

    name: Literal["yopo"] = "yopo"
    m: Count = 5
    n: NonNegativeInt = 3
    first_layer: str | None = Field(None, description="module where f0 ends; found by default")
    grad_at: Literal["after", "before", "last"] = "after"


class TRADESYOPOConfig(_Strict):
    """TRADES-YOPO-m-n."""

    name: Literal["trades-yopo"] = "trades-yopo"
    m: Count = 3
    n: NonNegativeInt = 4
    beta: NotNegative = Field(6.0, description="weight of the consistency, the paper's 1/λ")
    first_layer: str | None = Field(None, description="module where f0 ends; found by default")
    attack_mode: Literal["eval", "train"] = "eval"


class PMPConfig(_Strict):
    """Algorithm 1 in general form."""

    name: Literal["pmp"] = "pmp"
    m: Count = 5
    adversary: Literal["exact", "gradient", "lbfgs"] = "exact"
    n: Count = Field(10, description="steps of the adversary, where it is not exact")
    weights: Literal["gradient", "argmax"] = "gradient"
    rho: Positive = Field(0.3, description="how near argmax stays to the present states")
    steps: Count = Field(5, description="of L-BFGS a layer, for argmax")
    layers: Names | None = Field(None, description="modules where f0, f1, … end; found by default")
    weights_at: Literal["after", "before", "algorithm1"] = "after"


MethodConfig = Annotated[
    NaturalConfig
    | PGDConfig
    | FreeConfig
    | FastConfig
    | NFGSMConfig
    | TRADESConfig
    | YOPOConfig
    | TRADESYOPOConfig
    | PMPConfig,
    Field(discriminator="name"),
]
ThreatConfig = Annotated[LinfConfig | L2Config, Field(discriminator="name")]


class DataConfig(_Strict):
    """Images and what is done to them."""

    name: str = Field("mnist-subset", description="mnist-subset, mnist, cifar10, npz or folder")
    root: Path | None = Field(None, description="folder with the data (mnist, cifar10, folder)")
    path: Path | None = Field(None, description="file with the data (npz)")
    size: Count | None = Field(None, description="side that images of a folder are brought to")
    held_out: Count = Field(
        500, description="training images kept aside to choose the best weights"
    )
    crop: NonNegativeInt = Field(0, description="random shift, in pixels")
    flip: bool = Field(False, description="mirror at random")
    cutout: NonNegativeInt = Field(0, description="side of a blanked square")
    resident: bool = Field(True, description="keep all images on the device")


class ModelConfig(_Strict):
    """The network."""

    name: str = Field(
        "smallcnn",
        description="smallcnn, preactresnet18, wideresnet, my_module:function, or timm:NAME",
    )
    options: Options = Field(
        default_factory=dict, description="arguments of the network, as --model.options.width 16"
    )
    normalize: bool = Field(False, description="normalise by the training set's mean and deviation")
    channels_last: bool = False


class OptimizerConfig(_Strict):
    """SGD with momentum, or AdamW, whose first beta is `momentum`."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = 0.1
    momentum: Part = Field(0.9, description="of adamw the first beta")
    nesterov: bool = Field(False, description="sgd alone")
    weight_decay: NotNegative = 5e-4
    clip: Positive | None = Field(None, description="largest norm of the gradient")
    accumulate: Count = Field(1, description="batches for each optimizer step")


class ScheduleConfig(_Strict):
    """The learning rate over time, in epochs."""

    name: Literal["constant", "piecewise", "cosine", "onecycle"] = "constant"
    warmup: NotNegative = Field(0.0, description="epochs of linear growth (onecycle: to the peak)")
    drops: Epochs = Field(default_factory=list, description="epochs of a drop (piecewise)")
    factor: Positive = Field(0.1, description="what a drop multiplies the rate by")


class EvaluateConfig(_Strict):
    """What is measured on the held-out images while training."""

    every: Count = Field(1, description="epochs between evaluations")
    steps: Count = Field(10, description="steps of the PGD attack")
    images: Count = Field(500, description="held-out images to attack")
    keep: Literal["best", "last"] = Field(
        "best", description="the evaluated epoch whose weights become model.safetensors"
    )


class DiagnoseConfig(_Strict):
    """How well frozen co-states do while training; see docs/diagnose.md."""

    every: NonNegativeInt = Field(0, description="epochs between looks; 0: never")
    images: Annotated[int, Field(ge=2)] = Field(64, description="held-out images to look at")


class GuardConfig(_Strict):
    """What to do when training collapses."""

    action: Literal["rollback", "stop", "ignore"] = "rollback"
    shrink: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="what a rollback multiplies the learning rate by"
    )
    most: Count = Field(5, description="rollbacks before the run stops")


class CheckpointConfig(_Strict):
    """When the run's state is written."""

    minutes: NotNegative = Field(10.0, description="most time between checkpoints")
    pause: NotNegative = Field(
        10.0, description="seconds; an epoch that ends sooner after the last one writes none"
    )
    keep: Count = Field(2, description="checkpoints that stay")


class Config(_Strict):
    """A whole run."""

    method: MethodConfig = YOPOConfig()
    threat: ThreatConfig = LinfConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    epochs: Count = 10
    batch: Count = Field(128, description="images a step, over all processes")
    seed: int = 0
    train_eps: Positive = Field(1.0, description="radius of the ball trained with, in threat.eps")
    eps_warmup: NotNegative = Field(0.0, description="epochs in which eps grows from 0")
    label_smoothing: Part = 0.0
    ema: Part = Field(0.0, description="decay of the averaged weights")
    precision: Literal["float32", "bf16"] = "float32"
    engine: Literal["auto", "plain", "compiled"] = Field(
        "auto", description="auto is compiled (and captured) on a GPU, plain elsewhere"
    )
    sync_batchnorm: bool = Field(False, description="BatchNorm statistics over all processes")
    notes: str = Field("", description="where the recipe departs from its source")

    def tree(self) -> Tree:
        """The configuration as plain nested values, for YAML and JSON."""
        return self.model_dump(mode="json")


def what_counts(config: Config) -> Tree:
    """What must be the same for a run to go on; where data lies and when to save may differ."""
    tree = config.tree()
    for key in ("checkpoint", "diagnose", "notes", "engine"):
        tree.pop(key)
    for key in ("root", "path", "resident"):
        tree["data"].pop(key)
    return tree


def refuse_another(where: Path, there: Tree, mine: Tree) -> None:
    """Name the settings in which the run `there` differs from mine."""
    had, have = flat(there), flat(mine)
    if other := [key for key in {**have, **had} if had.get(key) != have.get(key)]:
        raise ValueError(
            f"{where} holds a run of another configuration ({', '.join(other)}); give "
            "another --out, or the settings in its config.yaml"
        )


# ---------------------------------------------------------------- putting values over others


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """`over` on top of `base`, at every depth.

    With another method or threat (a recipe for yopo, a flag for pgd), what the base says about the
    old one no longer applies and is dropped; so are the options of another model.
    """
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            renamed = "name" in value and "name" in below and value["name"] != below["name"]
            old = {k: v for k, v in below.items() if not (renamed and _belongs(key, k))}
            result[key] = overlay(old, value)
        else:
            result[key] = value
    return result


def _belongs(section: str, key: str) -> bool:
    """Whether a setting is the named thing's own, and goes when it goes."""
    return section in ("method", "threat") or (section == "model" and key == "options")


def rescaled(tree: Tree, epochs: int) -> Tree:
    """The same recipe in another number of epochs: its drops and warm-ups move along."""
    config = validate(tree)
    part = epochs / config.epochs
    schedule = {
        "warmup": part * config.schedule.warmup,
        "drops": [part * drop for drop in config.schedule.drops],
    }
    scaled: Tree = {"epochs": epochs, "eps_warmup": part * config.eps_warmup, "schedule": schedule}
    return overlay(tree, scaled)


def with_radius(tree: Tree, threat: Tree) -> Tree:
    """The same recipe for another radius, that of `threat`: its step moves along."""
    given, before = tree.get("threat", {}), validate(tree).threat
    if not {"eps", "step"} <= {*given} or threat.get("name", before.name) != before.name:
        return tree
    try:
        part = float(str(_number(threat["eps"]))) / before.eps
    except ValueError:  # pydantic will say what is wrong with it
        return tree
    if before.step is None or not 0 < part < float("inf"):
        return tree
    return overlay(tree, {"threat": {"step": part * before.step}})


def nested(flags: Mapping[str, str]) -> Tree:
    """{"method.m": "5"} as {"method": {"m": "5"}}; "model.options.width" goes into options."""
    tree: Tree = {}
    for dotted, value in flags.items():
        *path, last = dotted.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ValueError(f"--{dotted} does not go together with --{'.'.join(path)}")
        branch[last] = value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """{"method": {"m": 5}} as {"method.m": 5}."""
    found: Tree = {}
    for key, value in tree.items():
        inside = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return found


def validate(tree: Tree) -> Config:
    """Fill in the defaults; raise one ValueError that names every problem and its fix."""
    tree = overlay(Config().tree(), tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [_sentence(tree, dict(e)) for e in error.errors()]
        raise ValueError("\n".join(dict.fromkeys(problems))) from None


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every setting as (dotted name, default, description); methods' own under method.NAME."""
    for name, info in model.model_fields.items():
        dotted = prefix + name
        choices = [c for c in get_args(info.annotation) if _is_section(c)]
        if _is_section(info.annotation):
            yield from fields(info.annotation, dotted + ".")  # type: ignore[arg-type]
        elif choices:
            names = ", ".join(str(c.model_fields["name"].default) for c in choices)
            default = info.get_default(call_default_factory=True)
            yield f"{dotted}.name", default.name, names
            for choice in choices:
                kind = choice.model_fields["name"].default
                for inner, default, text in fields(choice, dotted + "."):
                    if not inner.endswith(".name"):
                        yield inner, default, f"({kind}) {text}".rstrip()
        else:
            default = info.get_default(call_default_factory=True)
            options = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            words = [info.description, " or ".join(map(str, options))]
            text = "; ".join(word for word in words if word)
            yield dotted, "" if default is None else str(default), text


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _sentence(tree: Tree, error: dict[str, Any]) -> str:
    """One problem in words, with near names where a name is unknown."""
    first, *inside = map(str, error["loc"])
    where = [first, *(inside[1:] if _kinds(first) else inside)]  # without the name of its kind
    dotted = ".".join(where)
    if error["type"] == "extra_forbidden":
        section = ".".join(where[:-1])
        known = _known(tree, section)
        near = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {section + '.' if section else ''}{near[0]}?" if near else ""
        return f"no setting {dotted}; {hint or 'there are: ' + ', '.join(known)}"
    if error["type"] == "union_tag_invalid":
        names = sorted(kind.model_fields["name"].default for kind in _kinds(dotted))
        given = tree[dotted]["name"]
        near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"no {dotted} {given!r}; {hint}there are: {', '.join(names)}"
    if len(where) == 1 and isinstance(Config().tree().get(dotted), dict):
        return f"{dotted} is a section of settings; write {dotted}.name, got {error['input']!r}"
    words = error["msg"].removeprefix("Value error, ")  # of a check of ours
    message = words[0].lower() + words[1:]
    return f"{dotted}: {message}, got {error['input']!r}"


def _kinds(section: str) -> list[type[BaseModel]]:
    """The sections to choose from, where there are several: methods, threats."""
    info = Config.model_fields.get(section)
    return [c for c in get_args(info.annotation) if _is_section(c)] if info else []


def _known(tree: Tree, section: str) -> list[str]:
    if not section:
        return list(Config.model_fields)
    for kind in _kinds(section):
        if kind.model_fields["name"].default == tree[section]["name"]:
            return list(kind.model_fields)
    return list(Config.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]
