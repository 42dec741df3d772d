"""What a run is made of: recipes, YAML files and flags all become a Config."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError

from yopo.runs.folder import CONFIG
from yopo.runs.overlay import Tree, flat, overlay
from yopo.runs.sections import (
    AnyMethod,
    BelowOne,
    CheckpointConfig,
    DataConfig,
    DiagnoseConfig,
    EvaluateConfig,
    Fit,
    FromOne,
    GuardConfig,
    LinfConfig,
    ModelConfig,
    NotNegative,
    OptimizerConfig,
    Positive,
    ScheduleConfig,
    Section,
    ThreatConfig,
    chosen,
    methods,
    number,
)

SAID = 10  # problems that are named


class Config(Section):
    """A whole run."""

    method: AnyMethod = chosen({"name": "yopo"})
    threat: ThreatConfig = LinfConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    epochs: FromOne = 10
    batch: FromOne = Field(128, description="images a step, over all processes")
    fit: Fit = Field([], description="of batch and epochs, what few images may change")
    seed: int = 0
    train_eps: Positive = Field(1.0, description="radius of the ball trained with, in threat.eps")
    eps_warmup: NotNegative = Field(0.0, description="epochs in which eps grows from 0")
    label_smoothing: BelowOne = 0.0
    ema: BelowOne = Field(0.0, description="decay of the averaged weights")
    precision: Literal["float32", "bf16"] = "float32"
    engine: Literal["auto", "plain", "compiled", "captured"] = Field(
        "auto",
        description="auto is compiled (and captured, by one process) on a GPU, plain elsewhere; "
        "captured: by several processes, too",
    )
    sync_batchnorm: bool = Field(False, description="BatchNorm statistics over all processes")
    parallel: Literal["flat", "ddp", "fsdp"] = Field(
        "flat", description="how several processes share a step; fsdp spreads the weights, too"
    )
    notes: str = Field("", description="where the recipe departs from its source")

    def tree(self) -> Tree:
        """The configuration as plain nested values, for YAML and JSON."""
        return self.model_dump(mode="json")


def what_counts(config: Config) -> Tree:
    """What must be the same for a run to go on; where data lies and when to save may differ."""
    tree = config.tree()
    for key in ("checkpoint", "diagnose", "notes", "engine", "fit", "parallel"):
        tree.pop(key)
    for key in (
        "root",
        "path",
        "resident",
        "skip_broken",
        "workers",
        "options",
        "interpolation",  # of evaluations alone
    ):  # the images themselves count
        tree["data"].pop(key)
    return tree


def refuse_another(where: Path, there: Tree, mine: Tree) -> None:
    """Name the settings in which the run `there` differs from mine."""
    had, have = flat(there), flat(mine)
    if other := [key for key in {**have, **had} if had.get(key) != have.get(key)]:
        raise ValueError(
            f"{where} holds a run of another configuration ({_short(', '.join(other))}); give "
            f"another --out, or the settings in its {CONFIG}"
        )


def rescaled(tree: Tree, epochs: int) -> Tree:
    """The same recipe in another number of epochs: drops, phases and warm-ups move along."""
    config = validate(tree)
    part = epochs / config.epochs
    schedule = {
        "warmup": part * config.schedule.warmup,
        "drops": [part * drop for drop in config.schedule.drops],
        "phases": [part * begin for begin in config.schedule.phases],
    }
    scaled: Tree = {"epochs": epochs, "eps_warmup": part * config.eps_warmup, "schedule": schedule}
    return overlay(tree, scaled)


def with_radius(tree: Tree, threat: Tree) -> Tree:
    """The same recipe for another radius, that of `threat`: its step moves along."""
    given, before = tree.get("threat", {}), validate(tree).threat
    if not {"eps", "step"} <= {*given} or threat.get("name", before.name) != before.name:
        return tree
    try:
        part = float(str(number(threat["eps"]))) / before.eps
    except ValueError:  # pydantic will say what is wrong with it
        return tree
    if before.step is None or not 0 < part < float("inf"):
        return tree
    return overlay(tree, {"threat": {"step": part * before.step}})


def validate(tree: Tree) -> Config:
    """Fill in the defaults; raise one ValueError that names every problem and its fix."""
    tree = overlay(Config().tree(), tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [*dict.fromkeys(_sentence(tree, dict(e)) for e in error.errors())]
        more = [f"and {len(problems) - SAID} more"] if len(problems) > SAID else []
        raise ValueError("\n".join([*problems[:SAID], *more])) from None


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every setting as (dotted name, default, description); methods' own under method.NAME."""
    for name, info in model.model_fields.items():
        dotted = prefix + name
        if choices := _kinds(dotted):
            names = ", ".join(str(c.model_fields["name"].default) for c in choices)
            default = info.get_default(call_default_factory=True)
            yield f"{dotted}.name", default.name, names
            for choice in choices:
                kind = choice.model_fields["name"].default
                for inner, default, text in fields(choice, dotted + "."):
                    if not inner.endswith(".name"):
                        yield inner, default, f"({kind}) {text}".rstrip()
        elif _is_section(info.annotation):
            yield from fields(info.annotation, dotted + ".")  # type: ignore[arg-type]
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
    first, *inside = (_short(str(part)) for part in error["loc"])
    got = _short(repr(error["input"]))
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
        return f"no {dotted} {_short(repr(given))}; {hint}there are: {', '.join(names)}"
    if len(where) == 1 and isinstance(Config().tree().get(dotted), dict):
        return f"{dotted} is a section of settings; write {dotted}.name, got {got}"
    words = error["msg"].removeprefix("Value error, ")  # of a check of ours
    message = words[0].lower() + words[1:]
    return f"{dotted}: {message}, got {got}"


def _short(words: str) -> str:
    """As much of them as a message bears."""
    return words if len(words) <= 80 else f"{words[:80]}…"


def _kinds(section: str) -> list[type[BaseModel]]:
    """The sections to choose from, where there are several: methods, threats."""
    if section == "method":
        return [*methods().values()]
    info = Config.model_fields.get(section)
    return [c for c in get_args(info.annotation) if _is_section(c)] if info else []


def _known(tree: Tree, section: str) -> list[str]:
    if not section:
        return list(Config.model_fields)
    for kind in _kinds(section):
        if kind.model_fields["name"].default == tree[section]["name"]:
            return list(kind.model_fields)
    return list(Config.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]
