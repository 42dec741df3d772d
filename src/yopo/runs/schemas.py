"""What stands in the files of a run, as far as anyone reads it.

Other things may stand there too, and do, of earlier and later versions.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from yopo.methods import registry

MOST = 10**12
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Spent = Annotated[float, Field(ge=0, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
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


class _Class(BaseModel):
    name: Words
    images: Whole
    clean: Whole
    worst: Whole


class _Radii(BaseModel):
    attack: Words
    eps: Annotated[list[Spent], Field(max_length=100)]
    accuracy: Annotated[list[Share], Field(max_length=100)]

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.eps) != len(self.accuracy):
            raise ValueError("expected an accuracy for each eps")
        return self


class EvaluationFile(BaseModel):
    """What an evaluation wrote."""

    attacks: Annotated[dict[Words, _Attack], Field(max_length=100)]
    worst: _Share
    about: _About
    warnings: Annotated[list[_Warning], Field(max_length=100)]
    classes: Annotated[list[_Class], Field(max_length=10_000)] = []
    confusion: Annotated[list[list[Whole]], Field(max_length=100)] = []
    radii: _Radii | None = None

    @model_validator(mode="after")
    def _square(self) -> Self:
        if any(len(row) != len(self.confusion) for row in self.confusion):
            raise ValueError("expected as many answers as labels")
        return self


Shares = Annotated[dict[Words, Share], Field(max_length=100)]


class _Metrics(BaseModel):
    lines: Whole
    sha256: Words


class ResultFile(BaseModel):
    """What the test set showed."""

    last: Shares
    best: Shares = {}
    best_epoch: int
    test_images: Count
    train_seconds: Annotated[float, Field(gt=1e-9, le=MOST)]
    propagations: Annotated[float, Field(gt=1e-9, le=MOST)]
    chance: Share = 0.0
    timed: bool = True
    test_sha256: Words = ""
    weights_sha256: dict[Words, Words] = {}
    metrics: _Metrics | None = None
    environment: Annotated[dict[Words, Words | None], Field(max_length=100)] = {}

    @model_validator(mode="after")
    def _clean_and_attacked(self) -> Self:
        if "clean" not in self.last or len(self.last) < 2:
            raise ValueError("expected clean and another")
        if "best" in self.model_fields_set and {*self.best} != {*self.last}:
            raise ValueError("expected the same in best as in last")
        return self


class ImagesSaid(BaseModel):
    """What stands beside weights of the images that they are for."""

    classes: Annotated[list[Words], Field(min_length=1, max_length=100_000)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=2**16)]], Field(min_length=3, max_length=3)]

    @model_validator(mode="after")
    def _bearable(self) -> Self:
        channels, height, width = self.shape
        if channels * height * width > 2**24:
            raise ValueError("expected images of at most 2^24 numbers")
        return self


class _Named(BaseModel):
    name: Words


class _Method(_Named):
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _counted(self) -> Self:
        """What its label is made of is whole numbers."""
        given = self.model_extra or {}
        for number in (given[k] for k in registry.numbers(self.name) if k in given):
            if type(number) is not int or not 0 <= number <= MOST:
                raise ValueError("expected whole numbers")
        return self


class _Threat(_Named):
    eps: Annotated[float, Field(gt=0, le=1e9)]


class _Data(_Named):
    path: Words | None = None
    root: Words | None = None
    size: Whole | None = None


class _Evaluate(BaseModel):
    steps: Whole


class ConfigFile(BaseModel):
    """The settings."""

    method: _Method
    threat: _Threat
    data: _Data
    model: _Named
    evaluate: _Evaluate
    epochs: Count
    seed: int
    notes: Text | None = None


class EpochLine(BaseModel):
    """An epoch."""

    epoch: Whole
    robust: Share | None = None
    clean: Share | None = None
    images: Count | None = None
    train_seconds: Spent | None = None
    processor_seconds: Spent | None = None
    propagations: Spent | None = None
    collapse: Text = ""
    action: Words = ""

    @model_validator(mode="after")
    def _with_action(self) -> Self:
        if "collapse" in self.model_fields_set and "action" not in self.model_fields_set:
            raise ValueError("expected an action beside collapse")
        return self


class _Told(BaseModel):
    id: Words | None = None
    step: Count = 0
    done: bool = False


class TrackedFile(BaseModel):
    """What trackers were told."""

    trackers: dict[Words, _Told]
