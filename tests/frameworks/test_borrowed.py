"""timm's networks on pictures of a folder, against timm's own preparation of them.

timm lies in a folder of its own, so it is imported in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "timm"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs timm, as make frameworks has it")
CODE = """
import sys
from pathlib import Path

import torch

from tests.frameworks.test_timm import without_compiled_parts

library = without_compiled_parts()

import timm
from PIL import Image
from timm.data import create_transform, resolve_data_config

from yopo.runs.borrowed import borrow
from yopo.runs.saved import load_model

photos, file, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
net = timm.create_model(name, num_classes=2).eval()
torch.save({"state_dict": net.state_dict()}, file)
prepare = create_transform(**resolve_data_config({}, model=net, use_test_size=True))
theirs = torch.stack([prepare(Image.open(f).convert("RGB")) for f in sorted(photos.glob("*/*"))])

data = {"name": "folder", "root": str(photos)}
saved = borrow(file, {"model": {"name": f"timm:{name}"}, "data": data})
mine = saved.data.test.read(torch.arange(len(theirs))).float() / 255
with torch.no_grad():
    print(float((load_model(saved, saved.data)(mine) - net(theirs)).abs().max()))
print(*mine.shape, saved.config.data.resize, saved.config.data.interpolation)
"""


@pytest.mark.parametrize("name", ["test_resnet", "test_vit2", "resnet10t"])
def test_a_network_of_timms_sees_what_timm_tests_it_on(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for k, (width, height) in enumerate([(200, 301), (400, 190), (171, 171)]):
        folder = tmp_path / "photos" / "ab"[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.png")
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    words = [sys.executable, "-c", CODE, f"{tmp_path}/photos", f"{tmp_path}/net.pth", name]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    difference, shape = done.stdout.splitlines()
    assert float(difference) < 1e-5
    sides = {"test_resnet": "3 3 160 160 168 bilinear", "test_vit2": "3 3 160 160 168 bicubic"}
    sides["resnet10t"] = "3 3 224 224 235 bicubic"  # trained with 176
    assert shape == sides[name]
