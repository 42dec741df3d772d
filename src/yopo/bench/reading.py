"""What `yopo bench --json` wrote, read and checked."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from yopo.runs.folder import read_checked
from yopo.runs.schemas import Count, Words


class _BenchRow(BaseModel):
    method: Words
    literal: Annotated[float, Field(gt=0, le=1e12)] | None = None


class _Bench(BaseModel):
    model: Words
    device: Words
    batch: Count
    rows: Annotated[list[_BenchRow], Field(max_length=1000)]


def read_bench(path: Path) -> dict[str, Any]:
    """The file's values."""
    return read_checked(path, _Bench, ["batch", "device", "model", "rows"])
