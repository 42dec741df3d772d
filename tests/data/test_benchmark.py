"""What `benchmarks.data` measures, in small: its folders, its two loaders, its clocks."""

import os
from pathlib import Path

import torch

from benchmarks.data import Setting, make_folder, opened, plainly, processor, pss, rates, read
from yopo.data.pictures import Folder

SMALL = Setting(size=8, batch=10, workers=0, area=0.5)


def test_both_loaders_read_the_same_pictures(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 140, sides=(20, 16))
    files = sorted((root / "train").rglob("*.jpg"))
    assert len(files) == 140
    assert len({file.stat().st_ino for file in files}) == 80
    made, plain = opened(root, SMALL), plainly(root, SMALL)
    assert isinstance(made.pictures.of, Folder)  # type: ignore[attr-defined]
    batches = [next(iter(epoch)) for epoch in (made.epoch(0), plain())]
    for x, y in batches:
        assert x.shape == (10, 3, 8, 8)
        assert x.dtype == torch.float32
        assert 0 <= float(x.min()) < float(x.max()) <= 1
        assert y.shape == (10,)
    told = read(root, SMALL, 3)
    assert told["pictures"] == 30
    assert told["first batch, s"] <= told["s"]
    assert read(root, SMALL, 0)["pictures"] == 40  # an epoch; 100 are held out
    beside = rates(root, SMALL, rounds=3, batches=2)
    assert beside["pairs"] == sorted(beside["pairs"])
    assert beside["ratio"] == beside["pairs"][1]


def test_memory_and_time_are_of_the_process_and_its_children() -> None:
    before = pss(os.getpid())
    kept = torch.ones(64 << 20, dtype=torch.uint8)
    assert pss(os.getpid()) - before > len(kept) // 2
    assert processor(os.getpid()) > 0
