"""The sections of a configuration, as typed values, and what words may stand for them."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationInfo,
    create_model,
    field_validator,
)

from yopo.core.files import parse_yaml
from yopo.methods import registry
from yopo.runs.folder import BEST
from yopo.runs.schemas import Words

MOST = 10**9  # of whole numbers and sizes; what is far beyond cannot be computed with
NUMBER = re.compile(r"[+-]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})(e[+-]?\d{1,3})?", re.IGNORECASE)


def read_number(text: str, name: str) -> float:
    """ "0.3", "8/255" or "2.5/255" as a number; `name` is what it is for."""
    above, over, below = text.replace(" ", "").partition("/")
    below = below if over else "1"
    try:
        if not (NUMBER.fullmatch(above) and NUMBER.fullmatch(below)):
            raise ValueError  # 1e999999999 would take hours
        return float(Fraction(above) / Fraction(below))
    except (ValueError, ArithmeticError):
        got = text if len(text) < 40 else f"{text[:40]}…"
        raise ValueError(f"expected a number for {name}, as 0.3 or 8/255, got {got!r}") from None


def number(value: object) -> object:
    """Let "8/255" be a number."""
    if isinstance(value, str) and "/" in value:
        try:
            return read_number(value, "a setting")
        except ValueError:
            return value  # pydantic says what is wrong with it
    return value


def _options(value: object) -> object:
    """Let options given as words be what YAML takes them for."""
    if not isinstance(value, Mapping):
        raise ValueError("expected one by one, as --model.options.width 16")
    return {k: _value(v, str(k)) if isinstance(v, str) else v for k, v in value.items()}


def _value(word: str, name: str) -> object:
    """As YAML, which takes 1e-3 for a word, and as Python."""
    value = parse_yaml(word, name)
    return float(word) if isinstance(value, str) and NUMBER.fullmatch(word) else value


def _list(value: object) -> object:
    """Let "30,36" be a list, and "[30, 36]" as config.yaml has it; "[]" is an empty one."""
    if not isinstance(value, str):
        return value
    words = [word.strip() for word in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return words if any(words) else []


def _held_out(value: object) -> object:
    """Images, as a whole number, or a part of them, as 0.1 or 1/10."""
    try:
        many = read_number(value, "it") if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        many = 0.0
    if 0 < many < 1:
        return many
    if not (1 <= many <= MOST and many.is_integer()) or isinstance(value, bool):
        raise ValueError("expected a number of images, as 500, or a part of them, as 0.1")
    return int(many)


def _normalization(value: object) -> object:
    """Let "0.5,0.5,0.5,0.2,0.2,0.2" be six numbers; words that YAML has for true and false, too."""
    if isinstance(value, str) and "," in value:
        return _list(value)
    if isinstance(value, list) and len(value) % 2:
        raise ValueError("expected as many means as deviations, as 0.5,0.5,0.5,0.2,0.2,0.2")
    return value


def _place(value: object) -> object:
    """A path that a message can name."""
    if len(str(value)) > 1000:
        raise ValueError("expected a path of at most 1,000 letters")
    return value


Positive = Annotated[float, BeforeValidator(number), Field(gt=0, le=MOST)]
NotNegative = Annotated[float, BeforeValidator(number), Field(ge=0, le=MOST)]
FromOne = Annotated[int, Field(ge=1, le=MOST)]
FromNought = Annotated[int, Field(ge=0, le=MOST)]
Place = Annotated[Path, BeforeValidator(_place)]
PositiveShare = Annotated[float, BeforeValidator(number), Field(gt=0, le=1)]
UpToOne = Annotated[float, BeforeValidator(number), Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Epochs = Annotated[list[NotNegative], BeforeValidator(_list)]
Counts = Annotated[list[FromOne], BeforeValidator(_list)]
Names = Annotated[list[Words], BeforeValidator(_list)]
Keywords = Annotated[dict[str, Any], BeforeValidator(_options)]
CountOrShare = Annotated[int | float, BeforeValidator(_held_out)]
Fit = Annotated[list[Literal["batch", "epochs"]], BeforeValidator(_list)]


Normalization = Annotated[
    bool
    | Literal["imagenet"]
    | Annotated[
        list[Annotated[float, Field(ge=-MOST, le=MOST)]], Field(min_length=2, max_length=6)
    ],
    BeforeValidator(_normalization),
]


class Section(BaseModel):
    """Settings that belong together; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LinfConfig(Section):
    """The L∞ ball."""

    name: Literal["linf"] = "linf"
    eps: Positive = 8 / 255
    step: Positive | None = Field(None, description="of one ascent step; eps/4 by default")


class L2Config(Section):
    """The L2 ball."""

    name: Literal["l2"] = "l2"
    eps: Positive = 0.5
    step: Positive | None = Field(None, description="of one ascent step; eps/4 by default")


class MethodConfig(Section):
    """A training method; each has settings of its own, those of its signature."""

    name: str


@cache
def _section(entry: registry.Entry) -> type[MethodConfig]:
    """The section of one method, from the signature of its class."""
    fields: dict[str, Any] = {"name": (Literal[entry.name], entry.name)}
    for name, parameter in entry.parameters.items():
        kind, optional = registry.kind(parameter.annotation)
        setting = entry.settings.get(name, registry.Setting())
        taken = _taken(kind, setting)
        default = Field(parameter.default, description=setting.about or None)
        fields[name] = (taken | None if optional else taken, default)
    return create_model(f"{entry.method.__name__}Config", __base__=MethodConfig, **fields)


def _taken(kind: Any, setting: registry.Setting) -> Any:  # noqa: ANN401
    """What a file or a flag may say for a parameter of that kind."""
    least = -MOST if setting.least is None else setting.least
    bounds: dict[str, Any] = {"ge": least} if setting.above is None else {"gt": setting.above}
    kinds = {
        int: Annotated[int, Field(**bounds, le=MOST)],
        float: Annotated[float, BeforeValidator(number), Field(**bounds, le=MOST)],
        str: Words,
        Sequence[str]: Names,
        list[str]: Names,
    }
    return kinds.get(kind, kind)


def methods() -> dict[str, type[MethodConfig]]:
    """The section of every method in the registry, by its name."""
    return {name: _section(entry) for name, entry in registry.ENTRIES.items()}


@cache
def _one_of(kinds: tuple[type[MethodConfig], ...]) -> TypeAdapter[MethodConfig]:
    """Reads a section of one of these kinds, which `name` tells."""
    choice: Any = Annotated[reduce(or_, kinds), Field(discriminator="name")]
    return TypeAdapter(choice)


def chosen(value: object) -> MethodConfig:
    """The section that its name chooses, of the methods that are known by now."""
    if isinstance(value, MethodConfig):
        return value
    return _one_of(tuple(methods().values())).validate_python(value)


AnyMethod = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(chosen)]
ThreatConfig = Annotated[LinfConfig | L2Config, Field(discriminator="name")]


class DataConfig(Section):
    """Images and what is done to them."""

    name: Words = Field(
        "mnist-subset",
        description="mnist-subset, mnist, cifar10, npz, folder, or my_module:build_data",
    )
    root: Place | None = Field(None, description="folder with the data (mnist, cifar10, folder)")
    path: Place | None = Field(None, description="file with the data (npz)")
    size: FromOne | None = Field(None, description="side that images of a folder are brought to")
    resize: FromOne | None = Field(
        None,
        description="side to which others' networks have pictures of a folder brought, before "
        "`size` is cut out; for `yopo eval`",
    )
    interpolation: Literal["bilinear", "bicubic"] = Field(
        "bilinear", description="how they are; for `yopo eval` of others' networks"
    )
    skip_broken: bool = Field(False, description="leave out pictures that cannot be read (folder)")
    held_out: CountOrShare = Field(
        500,
        description="training images kept aside to choose the best weights; below 1, a part of all",
    )
    crop: FromNought = Field(0, description="random shift, in pixels")
    flip: bool = Field(False, description="mirror at random")
    cutout: FromNought = Field(0, description="side of a blanked square")
    area: PositiveShare = Field(
        1.0, description="least share of a picture that is cut out to train on (folder)"
    )
    jitter: UpToOne = Field(0.0, description="change of brightness, contrast and saturation")
    resident: bool | None = Field(
        None,
        description="keep all images on the device; false: not there, and of a folder each is "
        "read when its turn comes, as by default where they are many",
    )
    workers: FromNought | None = Field(
        None, description="processes that decode pictures; by default one for each core, at most 16"
    )
    options: Keywords = Field(
        default_factory=dict,
        description="arguments of a build_data of your own, as --data.options.root DIR",
    )


class ModelConfig(Section):
    """The network."""

    name: Words = Field(
        "smallcnn",
        description="smallcnn, preactresnet18, wideresnet, resnet50, fitted (to the images' size), "
        "my_module:function, or timm:NAME",
    )
    options: Keywords = Field(
        default_factory=dict, description="arguments of the network, as --model.options.width 16"
    )
    start: Annotated[Words | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description="weights that training begins with: timm (those that it has for the network), "
        "or a safetensors file; the head is new where classes are others",
    )
    normalize: Normalization = Field(
        False,
        description="normalise by the training set's mean and deviation (true), by imagenet's, or "
        "by three means and three deviations",
    )
    channels_last: bool = False


class OptimizerConfig(Section):
    """SGD with momentum, or AdamW, whose first beta is `momentum`."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = 0.1
    momentum: BelowOne = Field(0.9, description="of adamw the first beta")
    nesterov: bool = Field(False, description="sgd alone")
    weight_decay: NotNegative = 5e-4
    clip: Positive | None = Field(None, description="largest norm of the gradient")
    accumulate: FromOne = Field(1, description="batches for each optimizer step")


class ScheduleConfig(Section):
    """The learning rate over time, in epochs, and what else differs from phase to phase."""

    name: Literal["constant", "piecewise", "cosine", "onecycle"] = "constant"
    warmup: NotNegative = Field(
        0.0,
        description="epochs of linear growth (onecycle: to the peak; there 0 means 30% of the "
        "epochs)",
    )
    drops: Epochs = Field(default_factory=list, description="epochs of a drop (piecewise)")
    factor: Positive = Field(0.1, description="what a drop multiplies the rate by")
    phases: Epochs = Field(default_factory=list, description="epochs at which a new phase begins")
    sizes: Counts = Field(
        default_factory=list,
        description="side of training pictures in each phase but the last, which has data.size",
    )
    m: Counts = Field(
        default_factory=list,
        description="method.m in each phase but the last, which has method.m itself",
    )

    @field_validator("phases")
    @classmethod
    def _in_order(cls, phases: list[float]) -> list[float]:
        if phases != sorted({*phases}) or 0 in phases:
            raise ValueError("expected epochs after the first, one later than the other, as 6,12")
        return phases

    @field_validator("sizes", "m")
    @classmethod
    def _one_a_phase(cls, values: list[int], info: ValidationInfo) -> list[int]:
        phases = info.data.get("phases", values)  # which may have been refused
        if values and len(values) != len(phases):
            raise ValueError(
                f"expected as many as schedule.phases, which are {len(phases)}: the last phase has "
                f"{'method.m' if info.field_name == 'm' else 'data.size'}"
            )
        return values


class EvaluateConfig(Section):
    """What is measured on the held-out images while training."""

    every: FromOne = Field(1, description="epochs between evaluations")
    steps: FromOne = Field(10, description="steps of the PGD attack")
    images: FromOne = Field(500, description="held-out images to attack")
    keep: Literal["best", "last"] = Field(
        "best", description=f"the evaluated epoch whose weights become {BEST}"
    )


class DiagnoseConfig(Section):
    """How well frozen co-states do while training; see docs/diagnose.md."""

    every: FromNought = Field(0, description="epochs between looks; 0: never")
    images: Annotated[int, Field(ge=2)] = Field(64, description="held-out images to look at")


class GuardConfig(Section):
    """What to do when training collapses."""

    action: Literal["rollback", "stop", "ignore"] = "rollback"
    shrink: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="what a rollback multiplies the learning rate by"
    )
    most: FromOne = Field(5, description="rollbacks before the run stops")


class CheckpointConfig(Section):
    """When the run's state is written."""

    minutes: NotNegative = Field(10.0, description="most time between checkpoints")
    pause: NotNegative = Field(
        10.0, description="seconds; an epoch that ends sooner after the last one writes none"
    )
    keep: FromOne = Field(2, description="checkpoints that stay")
