"""Numbers in the README are those of the records."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_step_times_in_the_readme() -> None:
    found = json.loads((ROOT / "records/speed-h200/bench-preactresnet18.json").read_text())
    readme = (ROOT / "README.md").read_text()
    rows = [row for row in found["rows"] if row["literal"]]
    assert len(rows) >= 4
    for r in rows:
        faster = r["literal"] / r["step"]
        line = f"| {r['method']} | {r['step']:.1f} | {r['literal']:.1f} | {faster:.1f} |"
        assert line in readme, line
