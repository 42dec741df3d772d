"""The files of a run. A disk that refuses one costs that file, not the run."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from yopo import checkpoint, files
from yopo.config import Config
from yopo.progress import Watcher

BEST, LAST = "model.safetensors", "model-last.safetensors"


class RunFolder:
    """One run's folder. Only the first process writes."""

    def __init__(self, path: Path, watch: Watcher, *, writes: bool) -> None:
        self.path, self.watch, self.writes = path, watch, writes
        self._unwritten: list[str] = []  # lines for metrics.jsonl

    def begin(self, config: Config, lines: int) -> None:
        """Write the settings; of the metrics, keep the first `lines`."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(config.tree(), sort_keys=False)
        files.write_text(self.path / "config.yaml", text)
        metrics = self.path / "metrics.jsonl"
        kept = metrics.read_text().splitlines()[:lines] if metrics.exists() else []
        files.write_text(metrics, "".join(line + "\n" for line in kept))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl; what cannot be written now is written with the next line."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }
        self._unwritten.append(json.dumps(finite) + "\n")
        if self.writes:
            file = self.path / "metrics.jsonl"
            size = file.stat().st_size if file.exists() else 0
            try:
                with file.open("a") as lines:
                    lines.write("".join(self._unwritten))
            except OSError as error:
                self.watch.say(f"could not write metrics.jsonl ({error})")
                with suppress(OSError):
                    os.truncate(file, size)  # half a line may be there
                return
        self._unwritten.clear()

    def save_weights(self, name: str, state: dict[str, Tensor], config: Config) -> bool:
        """Write a network's weights with the settings; say whether that worked."""
        if not self.writes:
            return True
        # One entry: safetensors writes several in any order, and equal runs would differ.
        metadata = {"config": json.dumps(config.tree())}
        try:
            checkpoint.save_weights(self.path / name, state, metadata)
        except OSError as error:
            self.watch.say(f"could not write {name} ({error})")
            return False
        return True

    def save_state(
        self, number: int, tensors: dict[str, Tensor], values: dict[str, Any], keep: set[int]
    ) -> bool:
        """Write a checkpoint and drop those not to keep; say whether that worked."""
        if not self.writes:
            return True
        try:
            checkpoint.save(self.path / "state", number, tensors, values, keep=keep)
        except OSError as error:
            self.watch.say(f"could not save a checkpoint ({error}); earlier ones are kept")
            return False
        return True

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write what the test set showed."""
        try:
            files.write_text(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        except OSError as error:
            self.watch.say(f"could not write result.json ({error})")
