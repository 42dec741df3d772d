"""Trained networks on disk: a run folder, or one weights file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import torch
from torch import Tensor, nn

from yopo.core import tensor_files
from yopo.core.slots import Slots
from yopo.core.tensor_files import Tensors
from yopo.data.sources import Arrays
from yopo.runs import strangers
from yopo.runs.build import build_data, build_model
from yopo.runs.folder import (
    CONFIG,
    WEIGHTS,
    is_run,
    read_settings,
    read_weights_images,
    read_weights_settings,
    runs_in,
)
from yopo.runs.images import DataSet, look
from yopo.runs.settings import Config, validate


@dataclass(frozen=True)
class Saved:
    """A network on disk, and whether the user vouches for the code that it names."""

    config: Config
    weights: Path
    trusted: bool  # the network's
    trusted_data: bool = False
    # Of a network of someone else's (`yopo.runs.borrowed`):
    state: Tensors | None = None  # what the file holds, in names of the network itself
    entry: str = ""  # of the file, where they stood
    data: DataSet | None = None


def find(
    path: Path,
    which: str | None = None,
    *,
    trust: bool = False,
    model_name: str | None = None,
    data_root: Path | None = None,
    data_path: Path | None = None,
) -> Saved:
    """The network in a run folder or a weights file, if it may be built.

    which: "best" or "last", of a run folder. trust: build what the run names, its data as well;
    model_name: the same for one network, my_module:build_model, that the user knows. data_root,
    data_path: where the run's data are now.
    """
    config, weights = _find(path, which)
    moved = {"root": data_root, "path": data_path}
    moved = {key: value for key, value in moved.items() if value is not None}
    data = config.data.model_copy(update=moved)
    config = config.model_copy(update={"data": data if trust else strangers.bounded(data)})
    name = config.model.name
    if model_name not in (None, name):
        raise ValueError(
            f"expected --model.name as {path} has it, {name!r}, got {model_name!r}; leave it "
            "out, or check the run"
        )
    own = model_name is not None and not name.startswith("timm:")
    saved = Saved(config, weights, trusted=trust or own, trusted_data=trust)
    if not saved.trusted:
        strangers.check(config.model)
    return saved


def _find(path: Path, which: str | None) -> tuple[Config, Path]:
    if path.is_dir():
        weights = path / WEIGHTS[which or "best"]
        if not is_run(path) or not weights.is_file():
            other = next((w for w, file in WEIGHTS.items() if (path / file).is_file()), None)
            advice = f"try --weights {other}" if other else "`yopo train` makes one"
            if inside := runs_in(path):
                advice = f"did you mean {inside[0]}?"
            raise ValueError(
                f"expected a run with {CONFIG} and {weights.name}, got {path}; {advice}"
            )
        return validate(read_settings(path, run=True)), weights
    if not path.is_file():
        raise ValueError(f"no run folder and no weights file {path}")
    if which is not None:
        raise ValueError(
            f"--weights chooses within a run folder, got the file {path}; leave it out"
        )
    return validate(read_weights_settings(path)), path


def load_data(saved: Saved) -> DataSet:
    """The data that the run was trained on."""
    if saved.data is not None:
        return saved.data
    d, build = saved.config.data, build_data if saved.trusted_data else strangers.load_data
    named = {key: place for key in ("root", "path") if (place := getattr(d, key)) is not None}
    if not saved.trusted and any(str(p)[:2] in ("//", "\\\\") for p in named.values()):
        raise ValueError(
            f"the run names data on another computer ({', '.join(map(str, named.values()))}), "
            "which was not asked for them; if you trust it, say --trust"
        )
    try:
        places = {key: _place(place, saved.weights) for key, place in named.items()}
        return build(d.model_copy(update=places))
    except (ValueError, OSError) as error:
        if all(_is_there(place, saved.weights) for place in named.values()):
            raise
        flag = "--data.path FILE" if d.path else "--data.root DIR"
        raise ValueError(
            f"{error}. The run names its data from the folder it was trained in; run this there, "
            f"or say where they are: {flag}"
        ) from None


def _place(named: Path, weights: Path) -> Path:
    """Where data are that were named from another folder: runs and data may have moved together.

    A run may have their name. It is no data, nor is a folder of runs, nor what lies in this run or
    around it.
    """
    if _is_there(named, weights):
        return named
    run, *around = weights.resolve().parents
    for place in ((folder / named).resolve() for folder in (run, *around)):
        ours = is_run(run) and (run in (place, *place.parents) or place in around)
        if place.exists() and not (ours or is_run(place) or runs_in(place)):
            return place
    if named.resolve() == run:
        raise FileNotFoundError(f"no data in {named}, which is the run itself")
    return named


def _is_there(named: Path, weights: Path) -> bool:
    """Whether a name means data as it is, seen from here, and not a run of the same name."""
    run = weights.resolve().parent
    return named.is_absolute() or (named.exists() and named.resolve() != run and not is_run(named))


def load_images(saved: Saved) -> DataSet:
    """One black image like those of the run, with the classes' names; its data, if it says none."""
    told = read_weights_images(saved.weights)
    if told is None:
        return load_data(saved)
    x, y = torch.zeros(1, *told.shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    return Arrays(x, y, x, y, tuple(told.classes))


def completed(state: Tensors, own: Tensors) -> Tensors:
    """Others' weights under our names: our normalisation, and counters of BatchNorm if they lack.

    The counters say how many batches were seen, and are of no use after training.
    """
    if "normalize.mean" in own and "normalize.mean" not in state:
        state = {f"net.{name}": tensor for name, tensor in state.items()}
    kept = ("normalize.mean", "normalize.std")
    lacking = (n for n in own if n in kept or n.endswith(".num_batches_tracked"))
    return {name: own[name] for name in lacking} | state


def differences(own: Tensors, state: Tensors) -> str:
    """In which names and shapes some weights differ from a network's own: the first of them."""
    wrong = [f"no {name}" for name in own if name not in state]
    wrong += [f"{name}, which it does not have" for name in state if name not in own]
    wrong += [
        f"{name} of shape {_kind(state[name])}, not {_kind(own[name])}"
        for name in own
        if name in state and _kind(state[name]) != _kind(own[name])
    ]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(w[:100] for w in wrong[:3]) + more


def _kind(tensor: Tensor) -> str:
    """What must agree for its numbers to be taken over: copied into real ones, others lose half."""
    return f"{tuple(tensor.shape)}{' of complex numbers' * tensor.is_complex()}"


def _check_classes(learnt: Sequence[str], there: Sequence[str]) -> None:
    """Refuse data whose labels mean other classes; classes that are mere numbers have no names."""
    mine, theirs = ([normalize("NFC", name) for name in names] for names in (learnt, there))
    if mine == theirs or any(n == [*map(str, range(len(n)))] for n in (mine, theirs)):
        return
    differ = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b]
    first = differ[0] if differ else min(len(mine), len(theirs))
    has = [names[first] if first < len(names) else "none" for names in (mine, theirs)]
    raise ValueError(
        f"expected data of the classes that the network has learnt, {_few(mine)}, got "
        f"{_few(theirs)}: class {first} is {has[0]} there and {has[1]} here; rename the folders, "
        "or name the run's own data"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_model(saved: Saved, data: DataSet) -> nn.Module:
    """The network with its weights and its normalisation, in eval mode."""
    config, weights, classes = saved.config, saved.weights, len(data.names)
    if saved.state is None and (told := read_weights_images(weights)) is not None:
        _check_classes(told.classes, data.names)
    state = tensor_files.load_weights(weights) if saved.state is None else saved.state
    if saved.trusted:
        model = build_model(config.model, look(data, config.model), classes)
    else:
        held = {name: tuple(tensor.shape) for name, tensor in state.items()}
        model = strangers.build(config.model, look(data, config.model), classes, held)
    Slots(model).fit(state, {}, {})  # some networks fill buffers in their first pass
    own = model.state_dict()
    if saved.state is not None:
        state = completed(state, own)
    if wrong := differences(own, state):
        raise ValueError(
            f"{weights.name} is of another architecture than {config.model.name} with "
            f"{classes} classes: {wrong}"
        )
    model.load_state_dict(state)
    if config.model.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()
