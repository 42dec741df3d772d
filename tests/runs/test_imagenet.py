"""ImageNet's recipes from end to end, on a few small pictures in its folders, in two processes.

Trained, stopped, gone on with by another number of processes, attacked, and trained on.
"""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import yopo
import yopo.runs.trainer
from tests.cli.test_commands import yopo as command
from tests.tiny import PATIENCE, as_one_of, command_line, forkserver, free_port
from yopo.core import seals
from yopo.runs.api import configure, evaluate_run, train_run
from yopo.runs.learner import Learner
from yopo.runs.overlay import Tree, nested
from yopo.runs.progress import Progress

pytestmark = pytest.mark.usefixtures("float32")
CLASSES = ("n01440764", "n01443537", "n02102040")
SMALL = {
    "data.size": "48",
    "data.held_out": "0.1",
    "data.workers": "1",
    "model.options.width": "8",
    "model.options.blocks": "[1, 1, 1, 1]",
    "batch": "12",
    "epochs": "5",  # two of each of the first phases, one of the last
    "schedule.sizes": "32,40",
    "evaluate.steps": "2",
    "evaluate.images": "5",
    "checkpoint.pause": "0",
    "precision": "float32",
}
STOP = 2, 1  # epoch, counted from 0, and step: in the second phase


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/CLASS and val/CLASS, pictures of several sizes."""
    root, draw = tmp_path_factory.mktemp("imagenet") / "pictures", np.random.default_rng(0)
    for split, many in (("train", 15), ("val", 4)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for i in range(many):
                width, height = draw.integers(50, 90, 2)
                pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
                file = root / split / name / f"{split}_{i:08d}.JPEG"
                Image.fromarray(pixels).save(file, "JPEG")
    return root


def flags(folder: Path, **more: str) -> list[str]:
    words = SMALL | {"data.root": str(folder)} | more
    return [word for name, value in words.items() for word in (f"--{name}", value)]


def one_of(rank: int, world: int, port: int, words: list[str], said: str) -> None:
    """`yopo train` as torchrun starts it; several are told to stop in the middle of an epoch."""
    if world > 1:
        as_one_of(world, rank, port)
    yopo.runs.trainer.CHECK_EVERY = 1
    real = Learner.step

    def step(
        self: Learner, x: Tensor, y: Tensor, p: Progress, number: int, steps: int
    ) -> yopo.Step:
        if (p.epoch, number) == STOP and world > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, x, y, p, number, steps)

    Learner.step = step  # type: ignore[method-assign]
    command_line(words, said)


def started(world: int, words: list[str], said: Path) -> tuple[list[int | None], str]:
    """How the processes ended, and what the first one said."""
    context, port = forkserver(), free_port()
    files = [said.with_suffix(f".{rank}") for rank in range(world)]
    processes = [
        context.Process(target=one_of, args=(rank, world, port, words, str(file)))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes], files[0].read_text()


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """The folder of a run that was stopped and gone on with."""
    out = folder.parent / "run"
    words = ["train", "imagenet-fast", "--out", str(out), "--device", "cpu", *flags(folder)]
    ends, said = started(2, words, folder.parent / "two")
    assert ends == [130, 130], said
    assert "stopped and saved" in said
    assert not (out / "result.json").exists()
    assert len(seals.read_lines(out / "metrics.jsonl")[0]) == STOP[0]
    ends, said = started(1, [*words, "--resume"], folder.parent / "one")
    assert ends == [0], said
    assert f"going on from epoch {STOP[0] + 1}, step {STOP[1] + 1}" in said
    return out


def test_each_phase_is_trained_as_it_is_scheduled(run: Path) -> None:
    lines, torn = seals.read_lines(run / "metrics.jsonl")
    assert torn is None
    assert [line["size"] for line in lines] == [32, 32, 40, 40, 48]
    assert [line["m"] for line in lines] == [1, 1, 2, 2, 3]
    spent = np.cumsum([2 / 3 * line["m"] + 1 for line in lines])
    assert [line["propagations"] for line in lines] == pytest.approx(spent)
    result = seals.read_json(run / "result.json")
    assert result["propagations"] == pytest.approx(spent[-1])
    assert result["test_images"] == 12


def test_the_network_is_attacked_at_its_full_size_and_trained_on(
    run: Path, folder: Path, tmp_path: Path
) -> None:
    """By the recipe for pretrained networks, from its file, on two of the three classes."""
    result = evaluate_run(run, "pgd-1", device="cpu").result
    assert len(result.outcomes["clean"].correct) == 12
    net = yopo.load(run)
    assert net.image_shape == (3, 48, 48)
    assert net.class_names == CLASSES
    two = tmp_path / "two"
    for split in ("train", "val"):
        for name in CLASSES[:2]:
            (two / split).mkdir(parents=True, exist_ok=True)
            (two / split / name).symlink_to(folder / split / name)
    file = run / "model.safetensors"
    more: Tree = {"model": {"name": "resnet50"}, "data": {"root": str(two)}, "epochs": 1}
    start: Tree = {"model": {"start": str(file), "options": {"width": 8, "blocks": [1] * 4}}}
    small = {k: v for k, v in SMALL.items() if not k.startswith(("schedule", "epochs"))}
    given = configure("imagenet-finetune", nested(small), more, start)
    assert given.threat.eps == 4 / 255
    train_run(given, tmp_path / "tuned", device="cpu")
    tuned = yopo.load(tmp_path / "tuned").state_dict()
    before = net.state_dict()
    assert tuned["net.fc.weight"].shape[0] == 2
    far = [float((tuned[k] - before[k]).abs().max()) for k in tuned if "conv" in k]
    assert 0 < max(far) < 0.01  # one epoch at a small rate moves them a little


def test_its_dry_run_adds_up_the_phases(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "imagenet-fast", "--device", "cpu", "--dry-run", *flags(folder))
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    found = re.findall(
        r"# epochs (\d) to (\d): (\d+) px, m = (\d), ([\d.]+) .* epoch, ([\d.]+) ms a step", said
    )
    assert [row[:5] for row in found] == [
        ("1", "2", "32", "1", "1.67"),
        ("3", "4", "40", "2", "2.33"),
        ("5", "5", "48", "3", "3.00"),
    ]
    assert "# 5 epochs of 3 steps of 12 images" in said
    assert "# 11 propagations per image in all" in said
    times = [float(row[5]) for row in found]
    mean = float(re.findall(r"(?m)^# ([\d.]+) ms a step, so about", said)[0])
    assert mean == pytest.approx((2 * times[0] + 2 * times[1] + times[2]) / 5, rel=0.01)
    assert "PGD-2 on 20 held-out images over all epochs and on 12 test images at the end;" in said
    assert torch.get_default_dtype() == torch.float32
