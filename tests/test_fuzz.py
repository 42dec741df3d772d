"""No damaged or hostile file gives a traceback, hangs or takes all memory; see `fuzzing.py`.

`tools/fuzz.py` lets the same readers meet 20,000 files; records/fuzz-cpu has what it found.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings

from tests import fuzzing
from tests.fuzzing import GONE, PLACES, Damage, Hang, NoSentence, Reader, attempt, readers
from yopo.core import seals

ROOT = Path(__file__).parents[1]
NAMES = (
    *("recipe", "config, report", "metrics", "result", "eval", "examples", "bench"),
    *("config, eval", "weights", "eval before", "result, compare", "seal", "values", "state"),
    *("metrics, ls", "result, ls", "weights, predict", "weights, foreign", "shard"),
    *("journal", "journal's network", "npz", "idx", "idx, gzip", "cifar batch", "picture"),
)
# These do without a damaged file, or make it anew.
SPARED = {"examples", "eval before", "journal", "journal's network", "metrics, ls", "result, ls"}
OPTIONAL = {"metrics", "result", "eval", "result, compare"}  # a run may be without it
AMONG_OTHERS = {
    "seal",
    "values",
    "state",
    "shard",
    "idx",
    "idx, gzip",
    "cifar batch",
}  # the folder is named
INPUTS = 40  # for each reader
SLOW = {"eval before": 10}  # it evaluates a network


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

    @settings(
        max_examples=SLOW.get(name, INPUTS),
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(reader.inputs)
    def meet(damage: Damage) -> None:
        counts[attempt(reader, damage).refused is None] += 1

    meet()
    assert sum(counts.values()) >= SLOW.get(name, INPUTS) // 2
    assert attempt(reader, reader.whole).refused is None  # nothing was spoilt for later


@pytest.mark.parametrize(
    "name", ["config, report", "metrics", "result", "eval", "bench", "values", "result, compare"]
)
@pytest.mark.usefixtures("float32")
def test_no_value_of_another_kind_is_met_later(name: str, every: dict[str, Reader]) -> None:
    """Each value of each file, one by one."""
    reader, refused, accepted = every[name], 0, 0
    text, kind = reader.whole.decode(), reader.path.suffix
    if kind == ".yaml":
        tree, dump = yaml.safe_load(text), fuzzing.as_yaml
    elif kind == ".jsonl":
        tree, dump = [json.loads(text.splitlines()[0])], fuzzing.as_lines
    else:
        tree, dump = json.loads(text), fuzzing.as_json
        tree.pop(seals.KEY, None)
    values: tuple[Any, ...] = (
        (None, -1, "a") if kind == ".yaml" else (None, -1, 10**12, 0.5, "a", [], {})
    )
    for edit in fuzzing.each_edit(tree, values):
        if attempt(reader, dump(edit)).refused:
            refused += 1
        else:
            accepted += 1
    assert refused
    assert accepted


@pytest.mark.parametrize(
    ("name", "traps"),
    [
        ("cifar batch", fuzzing.PICKLES),
        ("picture", fuzzing.OTHERS),
        ("recipe", [text.encode() for text in fuzzing.YAML_TEXTS]),
        ("config, eval", [text.encode() for text in fuzzing.YAML_TEXTS]),
        ("weights, foreign", fuzzing.PICKLES),
    ],
)
@pytest.mark.usefixtures("float32")
def test_known_traps_are_refused(
    name: str, traps: Sequence[bytes], every: dict[str, Reader]
) -> None:
    for trap in traps:
        assert attempt(every[name], trap).refused, trap


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
            while what == "waiting":
                time.sleep(1)
            hungry.append(b"x" * (fuzzing.GROWTH + (1 << 20)))

        return Reader(file, fuzzing.VALUES, read)

    with pytest.raises(NoSentence, match="JSONDecodeError"):
        attempt(takes("traceback"), b"")
    with pytest.raises(NoSentence, match="memory grew"):
        attempt(takes("memory"), b"")
    hungry.clear()
    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    for what in ("time", "waiting"):
        with pytest.raises(Hang):
            attempt(takes(what), b"")
    with pytest.raises(NoSentence, match="exit 2"):
        fuzzing.command("report")  # argparse says its usage first


def test_the_record_has_20_000_inputs_and_no_failure() -> None:
    found = json.loads((ROOT / "records/fuzz-cpu/fuzz.json").read_text())
    assert {*found["readers"]} == {*NAMES}
    assert found["total"]["inputs"] >= 20_000
    assert found["total"]["failed"] == 0 == len(found["failures"])
    rows = [*found["readers"].values()]
    said = next(
        line for line in (ROOT / "records/README.md").read_text().splitlines() if "fuzz-cpu" in line
    )
    for key in ("inputs", "accepted", "refused"):
        assert f"{found['total'][key]:,}" in said
    assert f"{max(row['longest_seconds'] for row in rows):.2f} s" in said
    assert f"{max(row['growth_megabytes'] for row in rows)} MB" in said
    for row in rows:
        assert row["longest_seconds"] <= found["about"]["limits"]["seconds"] == fuzzing.SECONDS
        assert row["growth_megabytes"] << 20 <= fuzzing.GROWTH
        assert row["inputs"] >= 900
        assert row["accepted"]  # what passes is met by later code
