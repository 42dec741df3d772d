"""The files of a run, read and checked: what comes after meets no value of another kind.

Other things may stand in these files too, and do, of earlier and later versions.
"""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from yopo.core import seals

EVALUATIONS = ("eval.json", "model.eval.json", "model-last.eval.json")
EPOCHS = 50_000  # lines of metrics.jsonl

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Spent = Annotated[float, Field(ge=0, le=1e12)]
Whole = Annotated[int, Field(ge=0, le=10**12)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Words = Annotated[str, Field(max_length=1000)]
Text = Annotated[str, Field(max_length=10_000)]


class _Share(BaseModel):
    accuracy: Share
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)]


class _Attack(_Share):
    settings: Words
    seconds: Spent
    propagations: Spent
    after: dict[Words, Share] = {}


class _About(BaseModel):
    data: Words
    threat: Words
    weights: Words
    weights_sha256: Words
    precision: Words
    model: Words
    packages: Words
    hardware: Words
    finished: Words
    commit: Words | None = None
    images_sha256: Words = ""
    file_sha256: Words | None = None
    images: Count
    eps: Number
    seed: int
    batch: int


class _Warning(BaseModel):
    code: Words
    text: Text


class _Evaluation(BaseModel):
    attacks: Annotated[dict[Words, _Attack], Field(max_length=100)]
    worst: _Share
    about: _About
    warnings: Annotated[list[_Warning], Field(max_length=100)]


Measured = Annotated[dict[Words, Share], Field(max_length=100)]


class _Result(BaseModel):
    last: Measured
    best: Measured = {}
    best_epoch: int
    test_images: Count
    train_seconds: Annotated[float, Field(gt=1e-9, le=1e12)]
    propagations: Annotated[float, Field(gt=1e-9, le=1e12)]
    chance: Share = 0.0
    timed: bool = True
    test_sha256: Words = ""
    weights_sha256: dict[Words, Words] = {}
    environment: Annotated[dict[Words, Words | None], Field(max_length=100)] = {}

    @model_validator(mode="after")
    def _clean_and_attacked(self) -> Self:
        if "clean" not in self.last or len(self.last) < 2:
            raise ValueError("expected clean and another")
        if "best" in self.model_fields_set and {*self.best} != {*self.last}:
            raise ValueError("expected the same in best as in last")
        return self


class _Named(BaseModel):
    name: Words


class _Method(_Named):
    steps: Whole | None = None
    m: Whole | None = None
    n: Whole | None = None
    grad_at: Words = "after"


class _Threat(_Named):
    eps: Annotated[float, Field(gt=0, le=1e9)]


class _Data(_Named):
    path: Words | None = None
    root: Words | None = None
    size: Whole | None = None


class _Evaluate(BaseModel):
    steps: Whole


class _Config(BaseModel):
    method: _Method
    threat: _Threat
    data: _Data
    model: _Named
    evaluate: _Evaluate
    epochs: Count
    seed: int
    notes: Text | None = None


class _Line(BaseModel):
    epoch: Whole
    robust: Share | None = None
    clean: Share | None = None
    images: Count | None = None
    train_seconds: Spent | None = None
    propagations: Spent | None = None
    collapse: Text = ""
    action: Words = ""

    @model_validator(mode="after")
    def _told(self) -> Self:
        if "collapse" in self.model_fields_set and "action" not in self.model_fields_set:
            raise ValueError("expected an action beside collapse")
        return self


class _BenchRow(BaseModel):
    method: Words
    literal: Annotated[float, Field(gt=0, le=1e12)] | None = None


class _Bench(BaseModel):
    model: Words
    device: Words
    batch: Count
    rows: Annotated[list[_BenchRow], Field(max_length=1000)]


def read_config(path: Path) -> dict[str, Any]:
    """config.yaml, of this version or another."""
    config = seals.read_yaml(path)
    config = config if isinstance(config, dict) else {}
    method = config.get("method")
    lacking = [] if isinstance(method, dict) and "name" in method else ["method"]
    needed = ("threat", "data", "model", "evaluate", "epochs", "seed")
    lacking += [key for key in needed if key not in config]
    if lacking:
        raise ValueError(
            f"expected the settings of a run in {path}, found no "
            f"{', '.join(lacking)}; `yopo train` writes them"
        )
    return _checked(path, config, _Config)


def read_result(path: Path) -> dict[str, Any]:
    """result.json."""
    return _tree(path, _Result, ["last"])


def read_evaluation(path: Path) -> dict[str, Any]:
    """eval.json, or another of its kind."""
    return _tree(path, _Evaluation, ["about", "attacks", "warnings", "worst"])


def read_bench(path: Path) -> dict[str, Any]:
    """What `yopo bench --json` wrote."""
    return _tree(path, _Bench, ["batch", "device", "model", "rows"])


def read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """metrics.jsonl, and whether its last line is cut off; none, if there is no such file."""
    if not path.exists():
        return [], False
    lines, torn = seals.read_lines(path)
    if len(lines) > EPOCHS:
        raise ValueError(f"expected at most {EPOCHS:,} epochs in {path}, got {len(lines):,}")
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict):
            raise ValueError(f"expected an epoch in line {number} of {path}, got {str(line)[:40]}")
        _checked(path, line, _Line)
    return lines, torn is not None


def _tree(path: Path, kind: type[BaseModel], needed: list[str]) -> dict[str, Any]:
    value = seals.read_json(path)
    if not isinstance(value, dict) or not {*needed} <= {*value}:
        raise ValueError(f"expected {', '.join(needed)} in {path}; was it cut off?")
    return _checked(path, value, kind)


def _checked(path: Path, value: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Refuse a file that was edited, or written by another version, before it is drawn."""
    try:
        kind.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        nothing = first["type"] == "missing" or first["input"] is None
        got = "nothing" if nothing else repr(first["input"])[:40]
        where = ".".join(str(part)[:40] for part in first["loc"]) or first["msg"]
        raise ValueError(
            f"{path} was edited or is of another version: it has {got} for "
            f"{where}; make the file anew, or leave the run out"
        ) from None
    return value
