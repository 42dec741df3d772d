"""The files of a run: their names, what stands in them, how they are written and read.

No other module spells a name of these. What is read is checked: what comes after meets no value of
another kind. A disk that refuses a file costs that file, not the run.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from yopo.core import files, seals
from yopo.runs import schemas
from yopo.runs.overlay import Tree
from yopo.runs.progress import Watcher

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from yopo.runs.state import Checkpoint

CONFIG, METRICS, RESULT = "config.yaml", "metrics.jsonl", "result.json"
BEST, LAST = "model.safetensors", "model-last.safetensors"
WEIGHTS = {"best": BEST, "last": LAST}
STATE = "state"  # a folder of checkpoints
SEAL, VALUES = "seal.json", "values.json"  # of a checkpoint: digests of its files; no tensors
UNTIMED = "untimed"  # a mark: begun beside other runs on its GPU
DIAGNOSIS, DIAGNOSIS_PICTURE = "diagnose.json", "diagnose.png"
TRACKED = "tracking.json"  # what trackers call the run, and which epochs they have
EVALUATION, CARD = "eval.json", "eval.md"
LAST_EVALUATION = "model-last.eval.json"  # of that weights file by itself
EVALUATIONS = (EVALUATION, "model.eval.json", LAST_EVALUATION)
SHOWN = ("threat", "data", "images", "weights_sha256")  # of an evaluation, beside its examples
EPOCHS = 50_000  # lines of the metrics
ASIDES = 20  # evaluations of a run beside the newest that are read


# ---------------------------------------------------------------- where things are


def is_run(path: Path) -> bool:
    """Whether a folder says that it is a run."""
    return (path / CONFIG).is_file()


def is_finished(path: Path) -> bool:
    """Whether a run has its result, or what stands in its place."""
    return (path / RESULT).exists()


def has_result(path: Path) -> bool:
    """Whether the result of a run was written."""
    return (path / RESULT).is_file()


def marks(path: Path) -> list[Path]:
    """The files of a run that tell when it was worked on."""
    return [file for name in (CONFIG, METRICS, RESULT) if (file := path / name).exists()]


def runs_in(path: Path, named: str = "*") -> list[Path]:
    """The run folders in a folder."""
    return sorted(file.parent for file in path.glob(f"{named}/{CONFIG}"))


def begun_in(path: Path) -> list[Path]:
    """The folders in a folder in which a training was begun."""
    return sorted(file.parent for file in path.glob(f"*/{METRICS}"))


def evaluations_in(run: Path) -> list[Path]:
    """Values of all evaluations in a run's folder; those set aside come last, the newest of them.

    A folder of strangers may hold any number.
    """
    asides = (path for name in EVALUATIONS for path in run.glob(f"{Path(name).stem}-[0-9]*.json"))
    newest = sorted(asides, key=lambda path: path.name)[-ASIDES:]
    return [path for name in EVALUATIONS if (path := run / name).exists()] + newest[::-1]


@dataclass(frozen=True, slots=True)
class EvaluationFiles:
    """What an evaluation writes: into a run's folder, or beside a weights file."""

    stem: Path

    @classmethod
    def of(cls, run: Path) -> "EvaluationFiles":
        """Those of a run folder, or of a weights file."""
        return cls(run / Path(EVALUATION).stem if run.is_dir() else run.with_suffix(".eval"))

    @property
    def values(self) -> Path:
        """All numbers."""
        return self._named(".json")

    @property
    def card(self) -> Path:
        """The summary."""
        return self._named(".md")

    @property
    def examples(self) -> Path:
        """The adversarial images, where they were asked for."""
        return self._named("-examples.safetensors")

    @property
    def state(self) -> Path:
        """Finished batches, while it goes on."""
        return self._named("-state")

    def checked(self) -> "EvaluationFiles":
        """Themselves, once it is known, before the work, that its result can be kept."""
        for path in (self.state, *self.state.glob("*")):
            refuse_link(path)
        check_writable(self.stem.parent)
        return self

    def set_aside(self, when: str) -> Path:
        """Give the values and the card the name of that time; the new name of the values."""
        name = f"{self.stem.name}-{re.sub('[^0-9]', '', when)[:16]}"
        while (aside := self.stem.with_name(f"{name}.json")).exists():  # of the same minute
            name += "+"
        for file in (self.values, self.card):
            if file.exists():
                file.rename(file.with_name(name + file.suffix))
        files.flush(self.stem.parent)
        return aside

    def _named(self, end: str) -> Path:
        return self.stem.with_name(self.stem.name + end)


def tracker_files(run: Path, kind: str) -> Path:
    """The folder of a tracker's own files in a run's, as tensorboard/."""
    return run / kind


def tracked_in(run: Path) -> Path:
    """A run's folder, also of a weights file in it; of other files of weights one beside them."""
    if run.is_dir():
        return run
    if is_run(run.parent):
        return run.parent
    refuse_link(beside := run.with_suffix(".tracked"))
    return beside


def refuse_link(path: Path) -> None:
    """Refuse to write into a folder that a link stands for: it may lead anywhere."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link, and nothing of a run is written through one; put the folder itself "
            "there, or remove the link"
        )


def check_writable(folder: Path) -> None:
    """Find out before the work whether its result can be kept in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}); copy it first") from None


# ---------------------------------------------------------------- writing


class RunFolder:
    """One run's folder, while it trains. Only the first process writes."""

    def __init__(
        self, path: Path, watch: Watcher, *, writes: bool, images: Tree | None = None
    ) -> None:
        self.path, self.watch, self.writes = path, watch, writes
        self.images = images  # their classes and shape, which stand beside the weights
        self.lines: list[str] | None = None  # of the metrics; checkpoints hold them too
        self._torn = False  # the last one could not be written
        self._there: os.stat_result | None = None
        self._config: Tree | None = None
        refuse_link(path / STATE)  # other files are replaced whole, and so are links

    def begin(self, config: Tree, lines: int) -> None:
        """Write the settings and the first `lines` of the metrics; later ones will come again."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._there, self._config = self.path.stat(), config
        settings, metrics = self.path / CONFIG, self.path / METRICS
        there = _lines(metrics) if lines else []
        if self.lines is None:  # a new run, or a checkpoint of an earlier version
            self.lines = there[:lines]
        if there[:lines] != self.lines or len(self.lines) < lines:
            lost = lines - len(self.lines)
            done = f"{lost} lines of it are lost" if lost else "made again from the checkpoint"
            self.watch.say(f"{METRICS} was damaged; {done}")
        if lines:
            try:
                seals.read_yaml(settings)
            except (ValueError, OSError) as error:
                self.watch.say(f"{CONFIG} was damaged ({error}); made again")
        seals.write_yaml(settings, config)
        files.write_text(metrics, "".join(line + "\n" for line in self.lines))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append to the metrics; what cannot be written now is written with the next line."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }
        lines = self.lines or []
        self.lines = [*lines, seals.line(finite, lines[-1] if lines else "")]
        if not self.writes:
            return
        self._check_there()
        file = self.path / METRICS
        try:
            if self._torn or file.is_symlink() or not file.exists():
                files.write_text(file, "".join(line + "\n" for line in self.lines))
            else:
                with file.open("a", encoding="utf-8") as metrics:
                    metrics.write(self.lines[-1] + "\n")
            self._torn = False
        except OSError as error:
            self._torn = True
            self.watch.say(f"could not write {METRICS} ({error})")

    def save_weights(self, name: str, state: "dict[str, Tensor]", config: Tree) -> bool:
        """Write a network's weights with the settings; say whether that worked."""
        from yopo.core import tensor_files

        if not self.writes:
            return True
        self._check_there()
        words = {"config": json.dumps(config)}
        if self.images is not None:
            words["images"] = json.dumps(self.images)
        try:
            tensor_files.save_weights(self.path / name, state, words)
        except OSError as error:
            self.watch.say(f"could not write {name} ({error})")
            return False
        return True

    def mend_weights(self, name: str, state: "dict[str, Tensor]", config: Tree) -> bool:
        """Write weights again unless the file holds them; say whether they are there."""
        from yopo.core import tensor_files

        if not self.writes:
            return True
        try:
            there = tensor_files.load_weights(self.path / name)
            if there.keys() == state.keys() and all(_same(there[k], v) for k, v in state.items()):
                return True
        except FileNotFoundError:
            self.watch.say(f"{name} was not there; made again from the checkpoint")
        except (ValueError, OSError) as error:
            self.watch.say(f"{error}; {name} was made again from the checkpoint")
        return self.save_weights(name, state, config)

    def save_state(
        self,
        number: int,
        checkpoint: "Checkpoint",
        keep: int,
        group: "ProcessGroup | None" = None,
    ) -> bool:
        """Write a checkpoint and drop old ones; say whether that worked.

        group: all processes, where each writes a part. It may run beside the training.
        """
        from yopo.runs import state

        if not self.writes and group is None:
            return True
        try:
            self._check_there()
            if group is None:
                state.save(self.path / STATE, number, checkpoint, keep=keep)
            else:
                state.save_shards(self.path / STATE, number, checkpoint, keep=keep, group=group)
        except OSError as error:
            self.watch.say(f"could not save a checkpoint ({error}); earlier ones are kept")
            return False
        return True

    def summary(self) -> dict[str, Any]:
        """What the result says of the metrics, so that a cut end shows."""
        return _summed_up([seals.open_line(line, METRICS, None)[0] for line in self.lines or []])

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write what the test set showed, once the metrics are there, of which it has a digest."""
        self._check_there()
        self._mend_metrics()
        try:
            seals.write_json(self.path / RESULT, result)
        except OSError as error:
            self.watch.say(f"could not write {RESULT} ({error})")
            with suppress(OSError):  # an older one would be taken for this run's
                (self.path / RESULT).unlink(missing_ok=True)

    def _mend_metrics(self) -> None:
        """Write the metrics again if the file holds others."""
        file, expected = self.path / METRICS, "".join(line + "\n" for line in self.lines or [])
        with suppress(OSError, ValueError):
            if files.read_text(file) == expected:
                return
        if not self._torn:  # which was said
            self.watch.say(f"{METRICS} was damaged; made again")
        try:
            files.write_text(file, expected)
        except OSError as error:
            self.watch.say(f"could not write {METRICS} ({error})")

    def _check_there(self) -> None:
        """End a run whose folder was deleted: another may have begun under its name."""
        if self._there is None:
            return
        try:
            if os.path.samestat(self._there, self.path.stat()):
                if self._config is not None and not (self.path / CONFIG).exists():
                    seals.write_yaml(self.path / CONFIG, self._config)
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
    """The lines of the metrics up to the first that is damaged."""
    sound, check = list[str](), ""
    with suppress(ValueError, OSError):
        for text in files.read_text(path).split("\n")[:-1]:
            _, check = seals.open_line(text, path.name, check)
            sound.append(text)
    return sound


def _summed_up(lines: list[Any]) -> dict[str, Any]:
    """How many lines the metrics have, and a digest of them without what the clock says."""
    timeless = [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]
    return {"lines": len(lines), "sha256": seals.json_digest(timeless)}


def _same(a: "Tensor", b: "Tensor") -> bool:
    return a.dtype == b.dtype and a.equal(b.cpu())


def mark_untimed(path: Path) -> None:
    """Say of a run that begins that its time will not count; resumed, it stays what it was."""
    path.mkdir(parents=True, exist_ok=True)
    files.write_text(path / UNTIMED, "")


def settle_untimed(path: Path) -> None:
    """Let a finished run say that its time does not count, if it was begun so."""
    if (path / UNTIMED).exists() and is_finished(path):
        seals.write_json(path / RESULT, read_result(path) | {"timed": False})
        (path / UNTIMED).unlink()


def write_tracked(run: Path, tracked: Mapping[str, Any]) -> None:
    """Keep, for each tracker, its name for the run and the epoch that it was told of last."""
    run.mkdir(parents=True, exist_ok=True)
    seals.write_json(run / TRACKED, {"trackers": tracked, "made_here": _made_here(tracked)})


def _made_here(tracked: Mapping[str, Any]) -> str | None:
    """What nobody else can write beside it; None where no secret can be kept."""
    try:
        return seals.keyed(seals.json_digest(tracked), seals.key_for("tracking"))
    except OSError:
        return None


# ---------------------------------------------------------------- reading


def read_tracked(run: Path, *, here: bool = False) -> dict[str, dict[str, Any]]:
    """What `write_tracked` kept, here: by this user; nothing where no tracker was told."""
    if not (run / TRACKED).exists():
        return {}
    value = read_checked(run / TRACKED, schemas.TrackedFile, ["trackers"])
    own = _made_here(value["trackers"]) if here else None
    if here and (own is None or value.get("made_here") != own):
        raise ValueError(f"{run / TRACKED} was not written by you on this machine (--trust: it is)")
    return dict(value["trackers"])


def read_settings(path: Path, *, run: bool = False) -> Tree:
    """The settings in a YAML file, or those of a run; a checksum, if there is one, must agree."""
    file = path / CONFIG if run else path
    try:
        tree = seals.read_yaml(file)
    except FileNotFoundError:
        raise ValueError(f"no file {file}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"expected settings in {file}, got {type(tree).__name__}")
    return tree


def read_weights_settings(path: Path) -> Tree:
    """The settings beside the weights in a file of them."""
    from yopo.core import tensor_files

    settings = tensor_files.load_metadata(path).get("config")
    if settings is None:
        raise ValueError(
            f"{path.name} does not say which network it belongs to; expected a file that "
            "`yopo train` wrote, with the settings in its metadata"
        )
    tree = files.parse_json(settings, f"the metadata of {path.name}")
    if not isinstance(tree, dict):
        raise ValueError(f"expected settings in {path.name}, got {type(tree).__name__}")
    return tree


def read_weights_images(path: Path) -> schemas.ImagesSaid | None:
    """What a file of weights says of the images that it is for; earlier versions said nothing."""
    from yopo.core import tensor_files

    words = tensor_files.load_metadata(path).get("images")
    if words is None:
        return None
    value = files.parse_json(words, f"the metadata of {path.name}")
    if not isinstance(value, dict):
        raise ValueError(f"expected classes and a shape in {path.name}, got {str(value)[:40]}")
    _checked(path, value, schemas.ImagesSaid)
    return schemas.ImagesSaid.model_validate(value)


def read_config(run: Path) -> dict[str, Any]:
    """A run's settings, of this version or another."""
    path = run / CONFIG
    config = seals.read_yaml(path)
    config = config if isinstance(config, dict) else {}
    method = config.get("method")
    lacking = [] if isinstance(method, dict) and "name" in method else ["method"]
    needed = ("threat", "data", "model", "evaluate", "epochs", "seed")
    lacking += [key for key in needed if key not in config]
    if lacking:
        raise ValueError(
            f"expected the settings of a run in {path}, found no "
            f"{', '.join(lacking)}; `yopo train` writes them"
        )
    return _checked(path, config, schemas.ConfigFile)


def read_result(run: Path) -> dict[str, Any]:
    """What the test set showed at a run's end."""
    return read_checked(run / RESULT, schemas.ResultFile, ["last"])


def read_evaluation(path: Path) -> dict[str, Any]:
    """The values of an evaluation."""
    needed = ["about", "attacks", "warnings", "worst"]
    return read_checked(path, schemas.EvaluationFile, needed)


def read_lines(run: Path) -> tuple[list[dict[str, Any]], bool]:
    """A run's epochs, and whether the last line is cut off; none, if there is no such file."""
    path, saved = run / METRICS, _saved_lines(run)  # the metrics are ahead of checkpoints
    lines, torn = seals.read_lines(path) if path.exists() else ([], None)
    if len(lines) > EPOCHS:
        raise ValueError(f"expected at most {EPOCHS:,} epochs in {path}, got {len(lines):,}")
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict):
            raise ValueError(f"expected an epoch in line {number} of {path}, got {str(line)[:40]}")
        _checked(path, line, schemas.EpochLine)
    if lines[: len(saved)] != saved:
        raise ValueError(
            f"{path} has not the {len(saved)} lines that the newest checkpoint knows: it was cut "
            "off or edited; `train --resume` makes it again"
        )
    _refuse_another_end(run, lines)
    return lines, torn is not None


def _saved_lines(run: Path) -> list[Any]:
    """The epochs that the newest checkpoint of an unfinished run knows; a finished one counts."""
    if is_finished(run):
        return []
    sound = re.compile("save-[0-9]{6,9}")
    saves = [path for path in run.glob(f"{STATE}/save-*") if sound.fullmatch(path.name)]
    newest = max(saves, key=lambda path: int(path.name.removeprefix("save-")), default=run)
    try:
        if files.read_json(newest / SEAL)[VALUES] != files.file_digest(newest / VALUES):
            return []
        values = files.parse_json(files.read_text(newest / VALUES), VALUES, nan=True)
        return [seals.open_line(line, VALUES, None)[0] for line in values["metrics"]]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # resuming says what is wrong
        return []


def _refuse_another_end(run: Path, lines: list[dict[str, Any]]) -> None:
    """Refuse metrics that are not those that a finished run counted."""
    try:
        told = read_result(run).get("metrics")
    except (OSError, ValueError):  # said by whoever reads the result
        return
    if told is not None and told != (there := _summed_up(lines)):
        raise ValueError(
            f"{run / METRICS} has {there['lines']} lines, and {RESULT} was made of "
            f"{told['lines']}, or of others: it was cut off or edited; `train --resume` makes it "
            "again"
        )


def read_checked(path: Path, kind: type[BaseModel], needed: list[str]) -> dict[str, Any]:
    """A JSON file, if it says what `kind` has; `needed` tells one that was cut off."""
    value = seals.read_json(path)
    if not isinstance(value, dict) or not {*needed} <= {*value}:
        raise ValueError(f"expected {', '.join(needed)} in {path}; was it cut off?")
    return _checked(path, value, kind)


def _checked(path: Path, value: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Refuse a file that was edited, or written by another version, before it is drawn."""
    try:
        kind.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        nothing = first["type"] == "missing" or first["input"] is None
        got = "nothing" if nothing else repr(first["input"])[:40]
        where = ".".join(str(part)[:40] for part in first["loc"]) or first["msg"]
        raise ValueError(
            f"{path} was edited or is of another version: it has {got} for "
            f"{where}; make the file anew, or leave the run out"
        ) from None
    return value
