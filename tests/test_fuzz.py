"""No damaged or hostile file gives a traceback, hangs or takes all memory; see `fuzzing.py`.

`tools/fuzz.py` lets the same readers meet 20,000 files; records/fuzz-cpu has what it found.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests import fuzzing
from tests.fuzzing import GONE, PLACES, Damage, Hang, NoSentence, Reader, attempt, readers

ROOT = Path(__file__).parents[1]
NAMES = (
    *("recipe", "config, report", "metrics", "result", "eval", "examples", "bench"),
    *("config, eval", "weights", "eval before", "result, compare", "seal", "values", "state"),
    *("journal", "journal's network", "npz", "idx", "idx, gzip", "cifar batch", "picture"),
)
# These do without a damaged file, or make it anew.
SPARED = {"examples", "eval before", "journal", "journal's network"}
OPTIONAL = {"metrics", "result", "eval", "result, compare"}  # a run may be without it
AMONG_OTHERS = {"seal", "values", "state", "idx", "idx, gzip", "cifar batch"}  # the folder is named
INPUTS = 40  # for each reader


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Reader]]:
    before = torch.get_default_dtype(), Path.cwd()
    yield readers(tmp_path_factory.mktemp("fuzz") / "room")
    torch.set_default_dtype(before[0])
    os.chdir(before[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("float32")
def test_damaged_files_are_read_or_refused_in_a_sentence(
    name: str, every: dict[str, Reader]
) -> None:
    assert {*NAMES} == {*every}
    reader, counts = every[name], Counter[bool]()
    assert attempt(reader, reader.whole).refused is None

    @settings(max_examples=INPUTS, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(reader.inputs)
    def meet(damage: Damage) -> None:
        counts[attempt(reader, damage).refused is None] += 1

    meet()
    assert sum(counts.values()) >= INPUTS // 2
    assert attempt(reader, reader.whole).refused is None  # nothing was spoilt for later


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("float32")
def test_what_stands_in_a_files_place_is_named(name: str, every: dict[str, Reader]) -> None:
    reader = every[name]
    for place in PLACES:
        if place in GONE and name in OPTIONAL:
            continue
        refused = attempt(reader, place).refused
        if name not in SPARED:
            assert refused, (name, place)
        if refused and name not in AMONG_OTHERS:
            assert reader.path.name in refused or str(reader.path.parent) in refused, refused


def test_the_harness_sees_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a hang and a hunger for memory are not taken for a sentence."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    hungry: list[bytes] = []

    def takes(what: str) -> Reader:
        def read() -> None:
            if what == "traceback":
                fuzzing.ours(lambda: json.loads("{"))
            while what == "time":
                pass
            hungry.append(b"x" * (fuzzing.GROWTH + (1 << 20)))

        return Reader(file, fuzzing.VALUES, read)

    with pytest.raises(NoSentence, match="JSONDecodeError"):
        attempt(takes("traceback"), b"")
    with pytest.raises(NoSentence, match="memory grew"):
        attempt(takes("memory"), b"")
    hungry.clear()
    monkeypatch.setattr(fuzzing, "SECONDS", 0.1)
    with pytest.raises(Hang):
        attempt(takes("time"), b"")
    with pytest.raises(NoSentence, match="exit 2"):
        fuzzing.command("report")  # argparse says its usage first


def test_the_record_has_20_000_inputs_and_no_failure() -> None:
    found = json.loads((ROOT / "records/fuzz-cpu/fuzz.json").read_text())
    assert {*found["readers"]} == {*NAMES}
    assert found["total"]["inputs"] >= 20_000
    assert found["total"]["failed"] == 0 == len(found["failures"])
    for row in found["readers"].values():
        assert row["longest_seconds"] <= found["about"]["limits"]["seconds"] == fuzzing.SECONDS
        assert row["growth_megabytes"] << 20 <= fuzzing.GROWTH
        assert row["inputs"] >= 900
        assert row["accepted"]  # what passes is met by later code
