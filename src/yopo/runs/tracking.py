"""What trackers are told of a run, each epoch once; one that fails costs a warning, not the run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from yopo.core.parallel import is_spread
from yopo.integrations.trackers import Tracker, named
from yopo.runs import closeup, evaluating, folder
from yopo.runs.overlay import Tree
from yopo.runs.shown import choose
from yopo.runs.trainer import Trainer

Track = str | Sequence[str | Tracker]


class Tracking:
    """The trackers of one run. Which epochs each has, and its name for the run, are kept there.

    here: only what this user kept there is gone on with; the folder may be a stranger's, who would
    have trackers write into another run.
    """

    def __init__(
        self,
        track: Track,
        run: Path,
        name: str,
        settings: Tree,
        say: Callable[[str], None],
        *,
        here: bool = False,
    ) -> None:
        asked = [word.strip() for word in track.split(",")] if isinstance(track, str) else track
        self.trackers: dict[str, Tracker] = {}
        for one in asked:
            if isinstance(one, str):
                folder.refuse_link(folder.tracker_files(run, one))
            kind = one if isinstance(one, str) else type(one).__name__
            if not isinstance(one, str) and kind in self.trackers:  # two of a class
                kind = f"{kind}-{len(self.trackers) + 1}"
            self.trackers[kind] = named(one) if isinstance(one, str) else one
        self.run, self.name, self.settings, self.say = run, name, flat(settings, "."), say
        self.here = here
        self._kept: dict[str, dict[str, Any]] | None = None  # None: not begun
        self._had: dict[str, int] = {}  # epochs that each had when this process began
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self.trackers)

    def epoch(self, line: Tree) -> None:
        """An epoch's line of the metrics; one that a resumed run makes again was told before."""
        self._begin()
        step, values = int(line["epoch"]), numbers(line)
        if step <= self._last:  # it went back after a collapse
            self._had.clear()
        self._last = step
        self._each(lambda kind, t: None if step <= self._had.get(kind, 0) else t.log(values, step))
        for kind in self.trackers:
            self._kept_of(kind)["step"] = step
        self._keep()

    def found(
        self,
        values: Mapping[str, Any],
        step: int,
        pictures: Mapping[str, Tensor],
        card: str,
        *,
        once: bool = False,
    ) -> None:
        """What came out in the end; nothing more will come. once: not if it was told before."""
        self._begin()

        def tell(kind: str, tracker: Tracker) -> None:
            if once and self._kept_of(kind).get("done"):
                return
            tracker.log(numbers(values), step)
            for name, images in pictures.items():
                tracker.image(name, beside(images), step)
            if once:
                self._kept_of(kind)["done"] = True

        self._each(tell)
        self._keep()
        self.end(card)

    def end(self, card: str | None = None) -> None:
        """Nothing more will come, for now."""
        if self._kept is not None:
            self._each(lambda _kind, tracker: tracker.end(card))
        self._kept = None

    def _begin(self) -> None:
        if self._kept is not None:
            return
        try:
            self._kept = folder.read_tracked(self.run, here=self.here)
        except (ValueError, OSError) as error:
            self._kept = {}
            self.say(f"{error}; trackers begin a run of their own")
        self._had = {kind: kept.get("step", 0) for kind, kept in self._kept.items()}

        def start(kind: str, tracker: Tracker) -> None:
            before, place = self._kept_of(kind).get("id"), folder.tracker_files(self.run, kind)
            self._kept_of(kind)["id"] = tracker.start(place, self.name, self.settings, before)

        self._each(start)
        self._keep()

    def _kept_of(self, kind: str) -> dict[str, Any]:
        assert self._kept is not None
        return self._kept.setdefault(kind, {})

    def _keep(self) -> None:
        try:
            folder.write_tracked(self.run, self._kept or {})
        except OSError as error:
            self.say(f"could not write down what trackers have ({error})")

    def _each(self, work: Callable[[str, Tracker], object]) -> None:
        for kind, tracker in list(self.trackers.items()):
            try:
                work(kind, tracker)
            except Exception as error:
                del self.trackers[kind]
                reason = str(error).partition("\n")[0] or type(error).__name__
                self.say(f"{kind} failed ({reason}); the run goes on without it")


def trained(tracking: Tracking, trainer: Trainer, result: Tree) -> None:
    """The end of a training: what the test set showed, once."""
    config, test, model = trainer.config, trainer.images.test, trainer.learner.follower
    pictures: dict[str, Tensor] = {}
    if not is_spread(model):  # which no process can run alone
        rows = choose(test.labels)
        x, y = test.read(rows), test.labels[rows]
        hostile = closeup.attacked(model, x, y, evaluating.choose_threat(config, None), config.seed)
        pictures = {"test/clean": x, "test/adversarial": hostile}
    values = {f"test/{name}": result[name] for name in ("best", "last") if name in result}
    lines = [f"- {name}: {100 * share:.2f} %" for name, share in numbers(values).items()]
    card = "\n".join([f"# {tracking.name}", "", *lines, ""])
    tracking.found(values, config.epochs, pictures, card, once=True)


def evaluated(tracking: Tracking, seen: closeup.Seen, step: int) -> None:
    """An evaluation: its accuracies, its card, the eight images that all networks are shown."""
    rows, result = choose(seen.y), seen.result
    x, y = seen.pictures.read(rows), seen.y[rows]
    hostile = closeup.attacked(seen.model, x, y, seen.threat, result.about["seed"])
    values = {"eval": {**result.accuracy, "worst": result.worst, "eps": seen.threat.eps}}
    tracking.found(values, step, {"eval/clean": x, "eval/adversarial": hostile}, result.card())


class Told:
    """Who watches a run, and its trackers. What a watcher has no method for, it is not told."""

    def __init__(self, watch: object, tracking: Tracking | None = None) -> None:
        self.watch, self.tracking = watch, tracking

    def begin(self, epochs: int) -> None:
        """How many epochs it will be."""
        self._tell("begin", epochs)

    def say(self, text: str) -> None:
        """A line for the log."""
        self._tell("say", text)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """A step is done."""
        self._tell("step", epoch, step, steps, note)

    def attack(self, name: str, part: float, accuracy: float) -> None:
        """How far an attack is."""
        self._tell("attack", name, part, accuracy)

    def epoch(self, line: Tree) -> None:
        """An epoch is done."""
        self._tell("epoch", line)
        if self.tracking is not None:
            self.tracking.epoch(line)

    def _tell(self, what: str, *words: object) -> None:
        hear = getattr(self.watch, what, None)
        if hear is not None:
            hear(*words)


def flat(tree: Mapping[str, Any], sign: str = "/") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a/b": 1}."""
    numbers: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            numbers |= {f"{key}{sign}{inner}": v for inner, v in flat(value, sign).items()}
        else:
            numbers[key] = value
    return numbers


def numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """Its numbers, but that of the epoch."""
    kinds = (int, float)
    return {
        key: float(value)
        for key, value in flat(tree).items()
        if isinstance(value, kinds) and not isinstance(value, bool) and key != "epoch"
    }


def beside(images: Tensor) -> np.ndarray:  # (N, C, H, W) uint8 or in [0, 1] -> (H, N·W, 3) uint8
    """Images beside one another, as one picture."""
    whole = images if not images.is_floating_point() else (255 * images).round().clamp(0, 255)
    row = whole.byte().cpu().permute(2, 0, 3, 1).flatten(1, 2)  # (H, N·W, C)
    return row.expand(*row.shape[:2], 3).numpy() if row.shape[2] == 1 else row[..., :3].numpy()
