"""The paper's tables, as data."""

import json
from importlib.resources import files


def paper_table(name: str) -> dict[str, dict[str, float]]:
    """table1 … table4: for each method its accuracies in % by attack, and minutes where given."""
    tables = json.loads((files("yopo") / "data" / "paper.json").read_text())
    found: dict[str, dict[str, float]] = tables[name]
    return found
