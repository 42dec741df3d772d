"""Sizes of pictures and m that change from phase to phase: what a run does, resumes and costs."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import yopo.runs.epoch_end
import yopo.runs.trainer
from tests.data.test_folders import write
from tests.runs.test_trainer import assert_equal_runs
from tests.tiny import BASE, Silent, tiny_data, tiny_trainer
from yopo.core import seals
from yopo.data import Items, Sources
from yopo.runs.api import evaluate_run, measure_cost, method_configs, train_run
from yopo.runs.build import build_data, out_of_reach, propagations
from yopo.runs.guard import Health
from yopo.runs.learner import Learner
from yopo.runs.overlay import Tree, nested, overlay
from yopo.runs.progress import StopRequested
from yopo.runs.schedule import TrainingPhase, phase, phases
from yopo.runs.settings import Config, rescaled, validate
from yopo.runs.trainer import Trainer

pytestmark = [
    pytest.mark.usefixtures("float32"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a"),
]
CPU = torch.device("cpu")
SCHEDULE: Tree = {"name": "cosine", "warmup": 1, "phases": [1, 2], "sizes": [6, 12], "m": [1, 2]}
METHODS: dict[str, Tree] = {
    "yopo": {"name": "yopo", "m": 3, "n": 1, "first_layer": None},
    "free": {"name": "free", "m": 3},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, to train on and to test on."""
    root = tmp_path_factory.mktemp("phases") / "photos"
    for split, many in (("train", 15), ("val", 3)):
        write(root / split, many=many)
    return root


def config(photos: Path, method: str = "yopo", **over: object) -> Config:
    """Four epochs of 4 steps: pictures of 6, 12, 8 and 8 px, with m = 1, 2, 3 and 3."""
    data: Tree = {"name": "folder", "root": str(photos), "size": 8, "area": 0.5, "flip": True}
    net: Tree = {"name": "preactresnet18", "options": {"width": 4, "blocks": [1]}}
    tree: Tree = {
        "data": data | {"held_out": 10, "workers": 0},
        "method": METHODS[method],
        "schedule": SCHEDULE,
        "epochs": 4,
        "batch": 5,
        "eps_warmup": 2,
    }
    return validate(overlay(overlay(BASE | {"model": net}, tree), over))


# ---------------------------------------------------------------- settings


def test_epochs_belong_to_the_phase_that_has_begun() -> None:
    schedule = nested({"schedule.phases": "6,12", "schedule.sizes": "128,192"})
    given = validate(schedule | {"epochs": 15})
    assert phases(given) == [
        TrainingPhase(0, 6, 128, None),
        TrainingPhase(6, 12, 192, None),
        TrainingPhase(12, 15, None, None),
    ]
    sides = [phase(given, epoch).size for epoch in range(16)]
    assert sides == 6 * [128] + 6 * [192] + 4 * [None]
    assert phases(validate({"epochs": 3})) == [TrainingPhase(0, 3, None, None)]
    # They move along with the epochs, and one without an epoch is none.
    for epochs, begins in ((10, [0, 4, 8]), (5, [0, 2, 4]), (2, [0, 1]), (1, [0])):
        moved = validate(rescaled(given.tree(), epochs))
        assert [p.first for p in phases(moved)] == begins
        assert sum(p.epochs for p in phases(moved)) == epochs
    back = validate(rescaled(rescaled(given.tree(), 23), 15))
    assert max(back.schedule.phases) > 12  # by rounding
    assert phases(back) == phases(given)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"phases": "6,3"}, r"schedule\.phases: expected epochs after the first, .* as 6,12"),
        ({"phases": "0,3"}, r"schedule\.phases: expected epochs after the first"),
        ({"phases": "3", "sizes": "8,16"}, r"schedule\.sizes: expected as many .*, which are 1"),
        ({"sizes": "8"}, r"schedule\.sizes: .* which are 0: the last phase has data\.size"),
        ({"phases": "3", "m": "1,2"}, r"schedule\.m: .*: the last phase has method\.m"),
        ({"phases": "3", "m": "0"}, r"schedule\.m\.0: .*greater than or equal to 1"),
    ],
)
def test_mistakes_are_named(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(nested({f"schedule.{name}": value for name, value in flags.items()}))


def test_what_belonged_to_another_method_or_data_goes_with_it() -> None:
    base = config(Path("photos")).tree()
    pgd = validate(overlay(base, {"method": {"name": "pgd"}})).schedule
    assert (pgd.m, pgd.sizes) == ([], [6, 12])
    arrays = validate(overlay(base, {"data": {"name": "mnist"}})).schedule
    assert (arrays.m, arrays.sizes) == ([1, 2], [])
    both = validate(
        overlay(base, {"method": {"name": "free"}, "schedule": {"m": [4, 5]}, "seed": 3})
    )
    assert (both.schedule.m, both.schedule.sizes) == ([4, 5], [6, 12])
    more = validate(overlay(base, {"method": {"name": "yopo", "m": 5}}))
    assert (more.method.model_dump()["m"], more.schedule.m) == (5, [1, 2])


def test_a_method_without_m_is_refused(photos: Path) -> None:
    tree = overlay(config(photos).tree(), {"method": {"name": "pgd"}})
    given = validate(overlay(tree, {"schedule": {"m": [1, 2]}}))
    with pytest.raises(ValueError, match=r"schedule\.m is for methods .* pgd has none; leave it"):
        propagations(given)


def test_the_weakest_phase_must_reach_the_balls_surface() -> None:
    def said(m: list[int]) -> str | None:
        tree: Tree = {"method": {"name": "yopo", "m": 2, "n": 2}, "threat": {"eps": 0.1}}
        return out_of_reach(validate(tree | {"schedule": {"phases": [1], "m": m}}))

    assert said([]) is None
    assert said([3]) is None
    assert "2 steps of 0.025 add up to 0.05" in str(said([1]))


def test_equal_cost_counts_every_phase() -> None:
    """Of 12 propagations as many epochs as they pay for, not as many as the last phase has."""
    base: Tree = {"schedule": {"phases": [3], "m": [1]}, "epochs": 6}
    made = method_configs("demo", ["yopo-3-3-before", "yopo-4-3-before"], under=base, most=12.0)
    for (spec, given), m in zip(made.items(), (3, 4), strict=True):
        assert given.method.model_dump()["m"] == m
        paid = sum(p.epochs * (p.m or m) for p in phases(given))
        assert paid <= 12 < paid + m, spec
        assert len(phases(given)) == 2
    assert made["yopo-3-3-before"].epochs == 6
    flags: Tree = {"schedule": {"phases": [3], "m": [1]}}  # which stay as they are
    given = method_configs("demo", ["yopo-3-3-before"], flags, most=18.0)["yopo-3-3-before"]
    assert (given.epochs, given.schedule.phases) == (8, [3])
    with pytest.raises(ValueError, match=r"at least 1\.00, an epoch of yopo-3-3-before"):
        method_configs("demo", ["yopo-3-3-before"], under=base, most=0.5)


# ---------------------------------------------------------------- training


@pytest.fixture
def one_look_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)


def seen_by(trainer: Trainer) -> list[tuple[int, int, int]]:
    """Epoch, side and m of every step."""
    found: list[tuple[int, int, int]] = []
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        method = trainer.learner.method
        found.append((trainer.progress.epoch, x.shape[-1], method.settings()["m"]))
        return real(x, y, number)

    trainer._step = step  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_each_epoch_has_its_pictures_and_propagations(
    method: str, photos: Path, tmp_path: Path
) -> None:
    given = config(photos, method)
    trainer = Trainer(given, build_data(given.data), tmp_path, Silent(), CPU)
    seen = seen_by(trainer)
    trainer.run()
    wanted = [(6, 1), (12, 2), (8, 3), (8, 3)]
    assert seen == [(epoch, *pair) for epoch, pair in enumerate(wanted) for _ in range(4)]
    lines = seals.read_lines(tmp_path / "metrics.jsonl")[0]
    assert [(line["size"], line["m"]) for line in lines] == wanted
    more = 2 / 3 if method == "yopo" else 0
    spent = [sum(m + more for _, m in wanted[: i + 1]) for i in range(4)]
    assert [line["propagations"] for line in lines] == pytest.approx(spent)
    cost = measure_cost(given, "cpu")
    assert cost.propagations == pytest.approx(spent[-1])
    assert [p.phase for p in cost.phases] == phases(given)
    assert cost.seconds == pytest.approx(
        sum(4 * epochs * p.seconds for epochs, p in zip((1, 1, 2), cost.phases, strict=True))
    )
    # The network of the run is a network like others.
    assert evaluate_run(tmp_path, "pgd-1", device="cpu").result
    assert yopo.load(tmp_path).image_shape == (3, 8, 8)


def test_without_phases_a_run_is_what_it_was(photos: Path, tmp_path: Path) -> None:
    """A schedule that says of each phase what the settings say themselves changes nothing."""
    same: Tree = {"phases": [1, 2], "sizes": [8, 8], "m": [3, 3]}
    for name, schedule in (("plain", {"phases": [], "sizes": [], "m": []}), ("phases", same)):
        given = config(photos, "free", schedule=schedule)
        train_run(given, tmp_path / name, device="cpu")
    both = [
        (tmp_path / name / "model-last.safetensors").read_bytes() for name in ("plain", "phases")
    ]
    plain, scheduled = (yopo.load(tmp_path / n, "last").state_dict() for n in ("plain", "phases"))
    assert all(torch.equal(value, scheduled[name]) for name, value in plain.items())
    assert both[0] != both[1]  # the settings beside the weights
    assert "size" not in seals.read_lines(tmp_path / "plain" / "metrics.jsonl")[0][0]


# Robust accuracy by (epoch, rollbacks so far): the first epochs of the later phases collapse.
SCORES = {(0, 0): 0.5, (1, 0): 0.02, (1, 1): 0.6, (2, 1): 0.02, (2, 2): 0.7, (3, 2): 0.7}


@pytest.mark.parametrize(
    ("method", "engine"), [("yopo", "plain"), ("free", "plain"), ("free", "compiled")]
)
def test_it_goes_on_exactly_within_a_phase_between_them_and_after_a_collapse(
    method: str,
    engine: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_look_a_step: None,
    request: pytest.FixtureRequest,
) -> None:
    if engine == "compiled":
        request.getfixturevalue("graphs_alone")
    monkeypatch.setattr(
        yopo.runs.epoch_end, "Health", lambda **seen: Health(**seen | {"train": 0.95})
    )

    def built(out: Path, often: float) -> Trainer:
        given = config(
            photos,
            method,
            engine=engine,
            eps_warmup=0,
            checkpoint={"minutes": often, "pause": often},
        )
        trainer = Trainer(given, build_data(given.data), out, Silent(), CPU)
        trainer.images.chance = 0.1

        def evaluate(images: int) -> tuple[float, float]:
            p = trainer.progress
            return 0.9, SCORES[p.epoch, p.rollbacks]

        trainer.epoch_end.evaluate = evaluate  # type: ignore[method-assign]
        return trainer

    whole = built(tmp_path / "whole", 1e6)
    whole.run()
    assert whole.progress.rollbacks == 2
    stops = 0
    while True:
        trainer = built(tmp_path / "pieces", 0)
        trainer.resume()
        left = 7 if engine == "compiled" else 3

        def step(*_: object, trainer: Trainer = trainer) -> None:
            nonlocal left
            left -= 1
            trainer.stop = left <= 0

        monkeypatch.setattr(trainer.files.watch, "step", step)
        try:
            trainer.run()
            break
        except StopRequested:
            stops += 1
    assert stops >= 3
    assert_equal_runs(tmp_path / "whole", tmp_path / "pieces")


# ---------------------------------------------------------------- what is refused


def test_pictures_of_one_size_are_refused(photos: Path, tmp_path: Path) -> None:
    given = config(photos, data={"area": 1, "resident": True, "workers": None})
    with pytest.raises(
        ValueError, match=r"schedule\.sizes .* of folder are in memory .*resident f"
    ):
        train_run(given, tmp_path / "run", device="cpu")
    data = tiny_data()
    items = Items(torch.utils.data.TensorDataset(data.x_train, data.y_train))
    own = Sources(train=items, test=data.test, names=data.names, identity="four")
    mine = given.model_copy(
        update={"data": given.data.model_copy(update={"name": "my:build_data"})}
    )
    for images, words in ((own, r"of my:build_data have one size; .* method sized\(side\)"),):
        with pytest.raises(ValueError, match=words):
            Trainer(mine, images, tmp_path / "run", Silent(), CPU)
    assert not (tmp_path / "run").exists()


def test_a_network_for_one_size_is_refused_before_anything_is_written(
    photos: Path, tmp_path: Path
) -> None:
    """Also where the first phase has the size that it was made for."""
    model: Tree = {"name": "smallcnn", "options": {"width": 4, "hidden": 8}}
    given = config(photos, schedule={"sizes": [16, 24]}, data={"size": 16}, model=model)
    for attempt in (
        lambda: train_run(given, tmp_path / "run", device="cpu"),
        lambda: measure_cost(given, "cpu"),
    ):
        with pytest.raises(
            ValueError, match=r"smallcnn does not take images of shape \(3, 24, 24\)"
        ):
            attempt()
    assert not (tmp_path / "run" / "config.yaml").exists()


# ---------------------------------------------------------------- what a run will cost


class Slow(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Items that take their time, most of a step's by far."""

    def __init__(self) -> None:
        self.data = tiny_data()
        self.targets = self.data.y_train

    def __len__(self) -> int:
        return 120

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        time.sleep(0.01)
        return self.data.x_train[row], int(self.data.y_train[row])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Config:
    data = tiny_data()
    made = Sources(train=Items(Slow()), test=data.test, names=data.names, identity="slow")
    monkeypatch.setattr("yopo.runs.api.build_data", lambda _: made)
    return validate(overlay(BASE, {"epochs": 2, "batch": 10, "method": {"name": "natural"}}))


@pytest.mark.parametrize("workers", [0, 2])
def test_waiting_for_images_is_part_of_the_time(
    workers: int, slow: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With workers too, which make batches ready while the network is studied."""
    real = Learner.warm_up

    def warm_up(learner: Learner, x: Tensor, y: Tensor) -> float:
        time.sleep(0.6)
        return real(learner, x, y)

    monkeypatch.setattr(Learner, "warm_up", warm_up)
    given = validate(overlay(slow.tree(), {"data": {"workers": workers}}))
    cost = measure_cost(given, "cpu")
    took = train_run(given, tmp_path / "run", device="cpu")["train_seconds"]
    assert 0.6 < cost.seconds / took < 1.7
    least = 0.01 * 10 / max(workers, 1)  # a step's batch, by all workers together
    assert cost.seconds >= 0.8 * least * 2 * 10


def test_attacks_that_follow_training_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against those that a run makes, counted."""
    over: Tree = {"epochs": 5, "evaluate": {"every": 2, "images": 15, "steps": 3}}
    trainer = tiny_trainer(tmp_path, over | {"guard": {"action": "ignore"}})
    trainer.run()
    lines = seals.read_lines(tmp_path / "metrics.jsonl")[0]
    assert sum(line["images"] for line in lines) == trainer.epoch_end.attacked() == 75
    monkeypatch.setattr("yopo.runs.api.build_data", lambda _: tiny_data())
    cost = measure_cost(trainer.config, "cpu")
    assert (cost.held, cost.test) == (75, 40)
    assert cost.evaluations == pytest.approx((75 + 40) * (1 / 3 + 3 * 2 / 3) / 100)
