"""The paper's tables, as data."""

import json
from importlib.resources import files
from typing import Any


def paper() -> dict[str, Any]:
    """All of it: where it is from, and each table with its setting."""
    text = (files("yopo.paper") / "tables.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables


def paper_table(name: str) -> dict[str, dict[str, float]]:
    """table1 … table4: for each method its accuracies in % by attack, and minutes where given."""
    rows: dict[str, dict[str, float]] = paper()["tables"][name]["rows"]
    return rows
