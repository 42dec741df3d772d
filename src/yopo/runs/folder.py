"""The files of a run. A disk that refuses one costs that file, not the run."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yopo.core import files, seals, tensor_files
from yopo.runs import checkpoint
from yopo.runs.progress import Watcher
from yopo.runs.settings import Config

BEST, LAST = "model.safetensors", "model-last.safetensors"


class RunFolder:
    """One run's folder. Only the first process writes."""

    def __init__(self, path: Path, watch: Watcher, *, writes: bool) -> None:
        self.path, self.watch, self.writes = path, watch, writes
        self.lines: list[str] | None = None  # of metrics.jsonl; checkpoints hold them too
        self._torn = False  # the last one could not be written
        self._there: os.stat_result | None = None
        self._config: Config | None = None

    def begin(self, config: Config, lines: int) -> None:
        """Write the settings and the first `lines` of the metrics; later ones will come again."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._there, self._config = self.path.stat(), config
        settings, metrics = self.path / "config.yaml", self.path / "metrics.jsonl"
        there = _lines(metrics) if lines else []
        if self.lines is None:  # a new run, or a checkpoint of an earlier version
            self.lines = there[:lines]
        if there[:lines] != self.lines or len(self.lines) < lines:
            lost = lines - len(self.lines)
            done = f"{lost} lines of it are lost" if lost else "made again from the checkpoint"
            self.watch.say(f"metrics.jsonl was damaged; {done}")
        if lines:
            try:
                seals.read_yaml(settings)
            except (ValueError, OSError) as error:
                self.watch.say(f"config.yaml was damaged ({error}); made again")
        seals.write_yaml(settings, config.tree())
        files.write_text(metrics, "".join(line + "\n" for line in self.lines))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl; what cannot be written now is written with the next line."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }
        self.lines = [*(self.lines or []), seals.line(finite)]
        if not self.writes:
            return
        self._check_there()
        file = self.path / "metrics.jsonl"
        try:
            if self._torn or not file.exists():
                files.write_text(file, "".join(line + "\n" for line in self.lines))
            else:
                with file.open("a", encoding="utf-8") as metrics:
                    metrics.write(self.lines[-1] + "\n")
            self._torn = False
        except OSError as error:
            self._torn = True
            self.watch.say(f"could not write metrics.jsonl ({error})")

    def save_weights(self, name: str, state: dict[str, Tensor], config: Config) -> bool:
        """Write a network's weights with the settings; say whether that worked."""
        if not self.writes:
            return True
        self._check_there()
        try:
            metadata = {"config": json.dumps(config.tree())}
            tensor_files.save_weights(self.path / name, state, metadata)
        except OSError as error:
            self.watch.say(f"could not write {name} ({error})")
            return False
        return True

    def mend_weights(self, name: str, state: dict[str, Tensor], config: Config) -> bool:
        """Write weights again unless the file holds them; say whether they are there."""
        if not self.writes:
            return True
        try:
            found = tensor_files.load_weights(self.path / name)
            if found.keys() == state.keys() and all(_same(found[k], v) for k, v in state.items()):
                return True
        except FileNotFoundError:
            self.watch.say(f"{name} was not there; made again from the checkpoint")
        except (ValueError, OSError) as error:
            self.watch.say(f"{error}; {name} was made again from the checkpoint")
        return self.save_weights(name, state, config)

    def save_state(self, number: int, state: checkpoint.Saved, keep: int) -> bool:
        """Write a checkpoint and drop old ones; say whether that worked."""
        if not self.writes:
            return True
        self._check_there()
        state = replace(state, values=state.values | {"metrics": self.lines})
        try:
            checkpoint.save(self.path / "state", number, state, keep=keep)
        except OSError as error:
            self.watch.say(f"could not save a checkpoint ({error}); earlier ones are kept")
            return False
        return True

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write what the test set showed."""
        self._check_there()
        try:
            seals.write_json(self.path / "result.json", result)
        except OSError as error:
            self.watch.say(f"could not write result.json ({error})")

    def _check_there(self) -> None:
        """End a run whose folder was deleted: another may have begun under its name."""
        if self._there is None:
            return
        try:
            if os.path.samestat(self._there, self.path.stat()):
                if self._config is not None and not (self.path / "config.yaml").exists():
                    seals.write_yaml(self.path / "config.yaml", self._config.tree())
                return
        except FileNotFoundError:
            pass
        except OSError:  # the write itself will say what is wrong
            return
        raise RuntimeError(
            f"the run's folder {self.path} was deleted or replaced while it trained, so nothing "
            "more can be kept and the run ends"
        )


def _lines(path: Path) -> list[str]:
    """The lines of metrics.jsonl up to the first that is damaged."""
    found: list[str] = []
    with suppress(ValueError, OSError):
        for text in files.read_text(path).split("\n")[:-1]:
            seals.open_line(text, path.name)
            found.append(text)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b.cpu())
