"""A run's state: all tensors that it needs to go on, and the checkpoints that keep them.

A checkpoint is written whole or not at all, checked when read, and never pickled.
"""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import yopo
from yopo.core.files import file_digest, flush, parse_json, read_json, read_text
from yopo.core.parallel import in_group
from yopo.core.tensor_files import Tensors, load_tensors, write_tensors
from yopo.engine.ema import EMA
from yopo.runs import distributed

Values = dict[str, Any]


# ---------------------------------------------------------------- in memory


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parts of a run that hold tensors."""

    model: nn.Module
    ema: EMA | None
    optimizer: Optimizer
    method: yopo.Method

    def take(self) -> dict[str, Tensor]:
        """This process's tensors as they are now, by name."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"hidden.{k}": v for k, v in _hidden(self.model).items()}
        if self.ema:
            tensors |= {f"ema.{k}": v for k, v in self.ema.model.state_dict().items()}
            tensors |= {f"ema-hidden.{k}": v for k, v in _hidden(self.ema.model).items()}
        for i, p in enumerate(self._parameters()):
            tensors |= {f"optimizer.{i}.{k}": v for k, v in self._state(p).items()}
        return tensors | {f"{self._carried}{k}": v for k, v in self.method.state_dict().items()}

    def copy(self) -> dict[str, Tensor]:
        """The same, in memory of its own."""
        return {k: v.detach().to("cpu", copy=True) for k, v in self.take().items()}

    def is_finite(self) -> bool:
        """Whether no weight, average or state of the optimizer is NaN or infinite."""
        mine = {k: t for k, t in self.take().items() if not k.startswith(self._carried)}
        return all(bool(t.isfinite().all()) for t in mine.values() if t.is_floating_point())

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all processes: the first's, and of the others what is their own.

        These are buffers (BatchNorm's statistics, if not synchronised) and what the method carries.
        Nothing changes in any process, so a run that is saved goes on as one that is not.
        """
        if not in_group():
            return tensors
        whole = dict(tensors)
        for key in (k for k in tensors if k.startswith(self._carried)):
            whole[key] = torch.cat(distributed.gathered(tensors[key]))
        buffers = {f"model.{k}" for k, _ in self.model.named_buffers()}
        for key in (k for k in tensors if k in buffers or k.startswith("hidden.")):
            for rank, other in enumerate(distributed.gathered(tensors[key])):
                if not torch.equal(other, tensors[key].cpu()):
                    whole[f"rank-{rank}.{key}"] = other
        return whole

    def own(self, tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
        """Of the tensors of all processes, this one's; there may be more or fewer now."""
        shared = {k: v for k, v in tensors.items() if not k.startswith("rank-")}
        mine = {k: tensors.get(f"rank-{rank}.{k}", v) for k, v in shared.items()}
        carried = {k: v for k, v in mine.items() if k.startswith(self._carried)}
        return mine | {k: v.chunk(world)[rank] for k, v in carried.items()}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        """Make all parts what they were when `tensors` were taken in this process."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.model.load_state_dict(part("model."))
        if self.ema:
            self.ema.model.load_state_dict(part("ema."))
        followed = [self.model, *([self.ema.model] if self.ema else [])]
        for prefix, model in zip(("hidden.", "ema-hidden."), followed, strict=False):
            hidden, buffers = part(prefix), _hidden(model)
            for name in hidden.keys() & buffers.keys():
                buffers[name].copy_(hidden[name])
        for i, p in enumerate(self._parameters()):
            saved, there = part(f"optimizer.{i}."), self._state(p)
            for name, tensor in there.items():  # in place: a captured step knows it by its address
                tensor.copy_(saved.get(name, torch.zeros_like(tensor)))
            for name in saved.keys() - there.keys():
                value = saved[name]  # Adam counts its steps on the CPU
                self.optimizer.state[p][name] = (
                    value.clone() if name == "step" else torch.empty_like(p).copy_(value)
                )
        device = next(self.model.parameters()).device
        carried = {k: v.to(device, copy=True) for k, v in part(self._carried).items()}
        self.method.load_state_dict(carried)

    @property
    def _carried(self) -> str:
        """How the names begin of what the method carries: "free."."""
        return f"{type(self.method).__name__.lower()}."

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        """The optimizer's tensors for a parameter: momentum, Adam's moments and count."""
        state = self.optimizer.state.get(p, {})
        return {k: v for k, v in state.items() if isinstance(v, Tensor)}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _hidden(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are no part of the state_dict (`persistent=False`)."""
    shown = model.state_dict()
    return {k: b for k, b in model.named_buffers() if k not in shown}


# ---------------------------------------------------------------- on disk


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: all that a run needs to go on, in one folder that depends on no other file."""

    tensors: Tensors
    values: Values
    good: Tensors | None = None  # what a collapse goes back to, where that is another state
    # The best weights are copied into each: those in the run's folder may be damaged or deleted,
    # and no later epoch would bring them back. A link would share the damage.
    best: Tensors | None = None


def save(folder: Path, number: int, state: Checkpoint, *, keep: int) -> None:
    """Write checkpoint `number`, the newest; then remove all but the newest `keep`.

    The files are written under another name, flushed to the disk and renamed, so that a process
    killed at any moment leaves either the whole checkpoint or none.
    """
    target, writing = folder / f"save-{number:06d}", folder / ".writing"
    _remove(writing)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        flush(folder.parent)
    writing.mkdir()
    parts = {"tensors": state.tensors, "good": state.good, "best": state.best}
    try:
        for name, tensors in parts.items():
            if tensors is not None:
                write_tensors(tensors, writing / f"{name}.safetensors")
        (writing / "values.json").write_text(json.dumps(state.values, sort_keys=True))
        seal = {file.name: file_digest(file) for file in sorted(writing.iterdir())}
        (writing / "seal.json").write_text(json.dumps(seal))
        for file in (*writing.iterdir(), writing):
            flush(file)
        _remove(target)  # there only if it was damaged
        writing.rename(target)
        flush(folder)
    except OSError:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    there = saved(folder)
    newer = there.index(target)  # were passed over as damaged, and would pass for the newest
    for old in (*there[:newer], *there[newer + keep :]):
        with suppress(OSError):
            _remove(old)


def saved(folder: Path) -> list[Path]:
    """All checkpoints, the newest first; what else lies there is none of ours."""
    named = (path for path in folder.glob("save-*") if re.fullmatch(r"save-[0-9]{6,9}", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix("save-")), reverse=True)


def load_newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over.

    Where none is, one that lacks no more than the way back or the best weights will do.
    """
    checkpoints = saved(folder)
    for path in checkpoints:
        try:
            return load(path)
        except ValueError as error:
            warn(f"{error}; going back to the checkpoint before it")
    for path in checkpoints:
        try:
            state = load(path, whole=False)
        except ValueError:
            continue
        warn(f"no checkpoint is whole; going on with what is sound of {path.name}")
        return state
    return None


def load(path: Path, *, whole: bool = True) -> Checkpoint:
    """One checkpoint, if its checksums agree; not `whole`: those of what a run goes on from."""
    try:
        seal = read_json(path / "seal.json")
        if not isinstance(seal, dict) or not seal:
            raise ValueError("seal.json holds no checksums")
        # Earlier versions left the endings out.
        old = {"tensors": "tensors.safetensors", "values": "values.json"}
        sums = {old.get(str(name), str(name)): digest for name, digest in seal.items()}
        if not {*old.values()} <= {*sums}:
            raise ValueError("seal.json lacks a checksum")
        sound = {}
        for name, digest in sums.items():
            if Path(name).name != name:
                raise ValueError(f"seal.json names {name!r}")
            sound[name] = (path / name).is_file() and digest == file_digest(path / name)
            if not sound[name] and (whole or name in old.values()):
                there = (path / name).is_file()
                raise ValueError(f"{name} was altered" if there else f"no {name}")
        values = parse_json(read_text(path / "values.json"), "values.json", nan=True)
        if not isinstance(values, dict):
            raise ValueError("values.json holds no values")
        parts = {
            name: load_tensors(path / f"{name}.safetensors")
            for name in ("tensors", "good", "best")
            if sound.get(f"{name}.safetensors")
        }
        return Checkpoint(values=values, **parts)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path.name} is damaged ({error})") from None


def _remove(path: Path) -> None:
    """A folder, or a file that has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
