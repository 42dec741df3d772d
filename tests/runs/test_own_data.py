"""Data of the user's own: named as a function, read when needed, resumed exactly."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import yopo
from tests.data.test_folders import write
from tests.tiny import BASE, Silent, as_one_of, in_two, tiny_data, weights
from yopo.data import Batches, Feed, InMemory, Items, Sources
from yopo.runs import api
from yopo.runs.build import build_data
from yopo.runs.images import Images
from yopo.runs.overlay import Tree, overlay
from yopo.runs.own import check_fits
from yopo.runs.progress import StopRequested
from yopo.runs.settings import Config, validate
from yopo.runs.trainer import Trainer

pytestmark = pytest.mark.usefixtures("float32")
CPU = torch.device("cpu")
ONE: Tree = {"epochs": 2, "method": {"name": "fast"}, "ema": 0}


def config(**over: object) -> Config:
    return validate(overlay(overlay(BASE, ONE), over))


def sources(train: Any, held: bool = False) -> Sources:
    data = tiny_data()
    kept = InMemory(data.x_test[:20], data.y_test[:20]) if held else None
    return Sources(train=train, test=data.test, names=data.names, identity="four", held=kept)


def trained(
    out: Path, images: Any, watch: Silent | None = None, data: Tree | None = None
) -> Trainer:
    trainer = Trainer(config(data=data or {}), images, out, watch or Silent(), CPU)
    trainer.resume()
    trainer.run()
    return trainer


def same(a: Trainer, b: Trainer) -> bool:
    one, other = weights(a.learner.model), weights(b.learner.model)
    return all(torch.equal(one[k], other[k]) for k in one)


def dataset() -> TensorDataset:
    data = tiny_data()
    return TensorDataset(data.x_train, data.y_train)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_data_set_trains_as_its_arrays_do(workers: int, tmp_path: Path) -> None:
    augment: Tree = {"crop": 2, "flip": True}
    plain = trained(tmp_path / "arrays", tiny_data(), data=augment)
    augment["workers"] = workers
    streamed = trained(tmp_path / "items", sources(Items(dataset())), data=augment)
    assert same(plain, streamed)
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("arrays", "items")]
    robust = [[json.loads(line)["robust"] for line in text.splitlines()] for text in lines]
    assert robust[0] == robust[1]


def test_another_number_of_images_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold out images that were trained on; a run of before has no numbers."""

    def made(out: str, many: int = 120) -> Trainer:
        data = tiny_data(many)
        images = Items(TensorDataset(data.x_train, data.y_train))
        return Trainer(config(), sources(images), tmp_path / out, Silent(), CPU)

    made("new").keeper.save()
    assert made("new").resume()
    with pytest.raises(ValueError, match=r"another configuration \(training images\)"):
        made("new", 124).resume()
    with monkeypatch.context() as before:
        before.setattr(Images, "identity", property(lambda own: {"training data": own.digest}))
        made("old").keeper.save()
    assert made("old").resume()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x, y + 2), "labels from 0 to 3"),
        (lambda x, y: (x, y[:, None].expand(-1, 4)), "expected a whole number"),
        (lambda x, y: (x / 128 - 1, y), r"images in \[0, 1\]"),
    ],
)
def test_a_test_set_that_cannot_be_used_is_refused_before_training(
    change: Any, words: str, tmp_path: Path
) -> None:
    data = tiny_data()
    x, y = change(data.x_test.flip(0), data.y_test.flip(0))
    test = Items(TensorDataset(x, y))
    images = Sources(train=Items(dataset()), test=test, names=data.names, identity="four")
    with pytest.raises(ValueError, match=words):
        trained(tmp_path / "run", images)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class Stops(Silent):
    """Asks to stop at a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.trainer = at, None

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        if epoch * steps + step == self.at:
            self.trainer.stop = True  # type: ignore[attr-defined]


def stopped_and_resumed(out: Path, make: Any, at: int) -> tuple[Trainer, Silent]:
    watch = Stops(at)
    trainer = Trainer(config(), make(), out, watch, CPU)
    watch.trainer = trainer  # type: ignore[assignment]
    with pytest.raises(StopRequested):
        trainer.run()
    again = Silent()
    return trained(out, make(), again), again


class Counting:
    """A loader that knows where it is; how many batches it made is counted."""

    made = 0

    def __init__(self, part: slice = slice(20)) -> None:
        self.at, self.goes_on, self.turn = 0, False, 0
        self.data, self.part = tiny_data(), part  # of each batch

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None:
        self.turn = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.at, self.goes_on = self.at if self.goes_on else 0, False
        order = torch.randperm(120, generator=torch.Generator().manual_seed(self.turn))
        for rows in order.split(20)[self.at :]:
            self.at += 1
            Counting.made += 1
            yield self.data.x_train[rows[self.part]], self.data.y_train[rows[self.part]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "part": self.part.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.goes_on = state["at"], True


def own_loader() -> Sources:
    return sources(Batches(Counting()), held=True)


def shuffling() -> Sources:
    return sources(Batches(DataLoader(dataset(), 20, shuffle=True)), held=True)


@pytest.mark.parametrize("make", [own_loader, shuffling])
def test_loaders_resume_exactly_in_the_middle_of_an_epoch(make: Any, tmp_path: Path) -> None:
    Counting.made = 0
    whole = trained(tmp_path / "whole", make())
    assert Counting.made == (12 if make is own_loader else 0)  # none is drawn only to warm up
    found, again = stopped_and_resumed(tmp_path / "stopped", make, at=9)
    assert same(whole, found)
    assert not any("training data" in line for line in again.said)
    if make is own_loader:
        assert Counting.made == 12 + 12  # none is drawn again


def rank(number: int, port: int, out: str) -> None:
    """One of two that train, stop, and save where their loaders are."""
    torch.set_num_threads(1)
    as_one_of(2, number, port)

    def make(feed: Feed) -> Any:
        return Counting(slice(10 * feed.rank, 10 * feed.rank + 10))

    trainer = Trainer(config(), sources(Batches(make), held=True), Path(out), Silent(), CPU)
    batches = trainer._rest()
    for _ in range(3):
        x, y = next(batches)
        trainer._step(x, y, trainer.progress.step)
        trainer.progress.step += 1
    trainer.keeper.save()
    x, y = next(batches)
    torch.save({"x": x, "y": y}, Path(out) / f"{number}.pt")


def test_each_process_keeps_where_its_loader_is(tmp_path: Path) -> None:
    parts = in_two(rank, tmp_path)
    (file,) = tmp_path.glob("state/save-*/values.json")
    states = json.loads(file.read_text())["source"]
    assert [state["loader"] for state in states] == [{"at": 3, "part": part} for part in (0, 10)]
    # One process goes on from it, and says that it cannot know where it was.
    watch = Silent()
    trainer = Trainer(config(), own_loader(), tmp_path, watch, CPU)
    assert trainer.resume()
    assert any("known for 2 processes, not for 1" in line for line in watch.said)
    y = next(trainer._rest())[1]
    assert torch.equal(y, torch.cat([part["y"] for part in parts]))  # passed over, all the same


# ---------------------------------------------------------------- folders


def test_a_folder_trains_alike_from_memory_and_picture_by_picture(tmp_path: Path) -> None:
    for split, many in (("train", 30), ("test", 4)):
        write(tmp_path / "photos" / split, many=many)
    model: Tree = {"name": "fitted", "options": {"width": 8, "size": 8}, "normalize": False}
    folder: Tree = {"name": "folder", "root": str(tmp_path / "photos"), "size": 8, "crop": 1}
    results = []
    for resident, there in ((None, True), (False, False)):
        data = folder | {"resident": resident, "held_out": 10}
        out = tmp_path / str(there)
        given = validate(overlay(overlay(BASE, ONE), {"data": data, "model": {"name": "fitted"}}))
        given = given.model_copy(update={"model": type(given.model).model_validate(model)})
        results.append(api.train_run(given, out, device="cpu"))
        written = api.configure(out / "config.yaml")
        assert written.data.resident is there  # as the evaluation will have it
        assert api.evaluate_run(out, "pgd-1", device="cpu").result
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["last"] == results[1]["last"]
    assert results[0]["test_sha256"] != results[1]["test_sha256"]  # of pixels, and of names
    with pytest.raises(ValueError, match=r"another configuration \(training data\)"):
        api.train_run(given, tmp_path / "True", device="cpu", resume=True)
    few = validate(overlay(given.tree(), {"data": {"workers": 2, "resident": True}}))
    with pytest.raises(ValueError, match=r"leave it out, or say --data\.resident false"):
        api.train_run(few, tmp_path / "few", device="cpu")
    with pytest.raises(ValueError, match=r"data\.area is for folders of pictures"):
        build_data(config(data={"area": "1/4"}).data)


# ---------------------------------------------------------------- the door

MINE = """
import torch
from tests.tiny import tiny_data
from yopo.data import Items, Sources
def build_data(part=1.0, root=None):
    data = tiny_data()
    train = Items(torch.utils.data.TensorDataset(data.x_train, data.y_train))
    return Sources(train=train, test=data.test, names=data.names, identity=f"{part} {root}")
def arrays():
    return tiny_data()
def other():
    return 7
word = "no function"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_of_data", raising=False)
    (tmp_path / "mine_of_data.py").write_text(MINE)
    return tmp_path


def test_a_function_of_the_users_own_makes_the_data(mine: Path) -> None:
    named: Tree = {"name": "mine_of_data:build_data", "options": {"part": "0.5"}, "root": "here"}
    data = build_data(config(data=named).data)
    assert isinstance(data, Sources)
    assert data.identity == "0.5 here"
    given = config(data=named, epochs=1)
    result = api.train_run(given, mine / "run", device="cpu")
    trust: dict[str, Any] = {"attacks": "pgd-1", "device": "cpu", "trust": True}
    found = api.evaluate_run(mine / "run", **trust).result
    assert found.accuracy["clean"] == pytest.approx(result["best"]["clean"])
    with pytest.raises(ValueError, match=r"names its data mine_of_data:build_data.*--trust"):
        api.evaluate_run(mine / "run", "pgd-1", device="cpu")
    net = yopo.load(mine / "run")
    assert net.class_names == ("a", "b", "c", "d")
    assert build_data(config(data={"name": "mine_of_data:arrays"}).data).many == 120


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "mine_of_data:other"}, r"to return yopo\.data\.Sources, or .*Arrays, got int"),
        ({"name": "mine_of_data:none"}, r"data\.name 'mine_of_data:none' does not import"),
        ({"name": "mine_of_data:word"}, "to be a function that returns .*, got str"),
        ({"name": "./mine.py:build"}, r"expected data\.name as my_module:build_data"),
        ({"name": "mine_of_data:arrays", "root": "x"}, r"data\.options do not fit .*'root'"),
        ({"name": "mnist-subset", "options": {"a": 1}}, r"leave out --data\.options\.a"),
        ({"name": "mnist_subst"}, "One of your own is my_module:build_data"),
    ],
)
def test_what_does_not_make_data_is_refused(mine: Path, data: Tree, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_data(config(data=data).data)


def test_an_option_may_have_any_name() -> None:
    def build(name: str, setting: str, build: str) -> None: ...

    check_fits("data.options", "mine:build", build, name="a", setting="b", build="c")
    with pytest.raises(ValueError, match=r"data\.options do not fit mine:build: .*'args'"):
        check_fits("data.options", "mine:build", build, name="a", setting="b", build="c", args="d")


def test_settings_that_would_not_be_heeded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.workers decode .* of mnist-subset are in memory"):
        Trainer(config(data={"workers": 2}), tiny_data(), tmp_path, Silent(), CPU)
    given = config(data={"crop": 2, "flip": True})
    with pytest.raises(ValueError, match=r"would not heed --data\.crop, --data\.flip"):
        Trainer(given, own_loader(), tmp_path, Silent(), CPU)
    heard: list[Feed] = []

    def open_(feed: Feed) -> Any:  # which is told of them
        heard.append(feed)
        return Batches(Counting())(feed)

    Trainer(given, sources(open_, held=True), tmp_path, Silent(), CPU)
    assert heard[0].augment.crop == 2
