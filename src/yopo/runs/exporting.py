"""A trained network as one file that runs without us: ONNX, or torch's own pt2.

The normalisation is inside; names of classes, shape, threat and accuracies stand beside it.
"""

import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import yopo
from yopo.attacks import pgd
from yopo.attacks.steps import step_size
from yopo.core import files
from yopo.core.threat import L2, Linf
from yopo.evaluation.card import norm
from yopo.runs.accuracies import accuracies
from yopo.runs.build import build_threat
from yopo.runs.distributed import pick_device
from yopo.runs.folder import check_writable
from yopo.runs.hub import local
from yopo.runs.images import DataSet
from yopo.runs.saved import Saved, find, load_data, load_images, load_model

FORMATS = ("onnx", "pt2")
IMAGE, LOGITS = "image", "logits"  # names of the ONNX file's input and output
LARGEST = 1_900_000_000  # bytes of weights in one ONNX file, which ends at 2 GB
NEAR = 1e-3  # of the largest logit: what another order of sums may change
STEPS, BATCH, COMPARED = 20, 50, 16
WORDS = (
    *("class_names", "image_shape", "input", "output", "model", "method", "data", "threat"),
    *("accuracy", "accuracy_from", "accuracy_under", "weights_sha256", "made_by"),
)
Judge = Callable[[Tensor], Tensor]  # (B, C, H, W) float32 in [0, 1] -> logits (B, classes)


@dataclass(frozen=True, slots=True)
class Exported:
    """A file, and how it answers beside the network that it was made of."""

    path: Path  # of the file
    words: dict[str, str]  # in the file, beside the network
    difference: float | None  # the largest of any logit; None: nothing here can run the file
    check: str = ""  # accuracies, in words, if they were asked for


def export_run(
    run: Path,
    to: str,
    out: Path | None = None,
    *,
    weights: str | None = None,
    overwrite: bool = False,
    check: int = 0,
    seed: int = 0,
    device: str | None = None,
    trust: bool = False,
    model_name: str | None = None,
    data_root: Path | None = None,
    data_path: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write the network of a run folder or of a weights file as `to`, "onnx" or "pt2".

    out: by default beside the weights; overwrite: whatever is there. The file's answers are
    compared with the network's on random images of several batch sizes, and it is not kept if they
    differ. check: so many test images are attacked with PGD-20, too; of ONNX, which has no
    gradients, on the network itself (on `device`), and the file judges them. seed: of what is drawn
    for that. say: hears what is done. weights, trust, model_name, data_root, data_path: as in
    `yopo.runs.api.evaluate_run`.
    """
    if to not in FORMATS:
        raise ValueError(f"expected --to {' or '.join(FORMATS)}, got {to!r}")
    if check and to == "onnx":
        _needed("onnxruntime")
    where = {"data_root": data_root, "data_path": data_path}
    run = local(run)
    saved = find(run, weights, trust=trust, model_name=model_name, **where)
    out = out or saved.weights.with_suffix(f".{to}")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already; add --overwrite, or give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(out.parent)
    images = load_data(saved) if check else load_images(saved)
    net = load_model(saved, images)
    words = about(run, saved, images)
    say(f"exporting {saved.config.model.name} to {out}")
    packed = _packed(net, images.test.read(torch.arange(1)), to, words)
    judge = _judge(packed, to)
    difference = None if judge is None else compare(judge, net, images.test.shape, to)
    told = ""
    if check and judge is not None:
        n = min(check, len(images.test))
        say(f"attacking {n} test images with PGD-{STEPS}")
        chosen = torch.randperm(len(images.test), generator=_seeded(seed))[:n].sort().values
        x, y = images.test.read(chosen).float() / 255, images.test.labels[chosen]
        threat = build_threat(saved.config.threat)
        attacked = _Module(judge) if to == "pt2" else net.to(pick_device(device))
        told = judged(judge, attacked, x, y, threat, seed)
    with files.whole(out) as writing:
        writing.write_bytes(packed)
    return Exported(out, words, difference, told)


def about(run: Path, saved: Saved, images: DataSet) -> dict[str, str]:
    """What stands in the file, each a text; what is more than a word is JSON."""
    config, known = saved.config, accuracies(run, saved)
    trained = {"name": config.threat.name, "eps": config.threat.eps}
    evaluated = known.evaluation if known else None  # maybe at another radius
    words: dict[str, Any] = {
        "class_names": images.names,
        "image_shape": [*images.test.shape],
        "input": "images (batch, C, H, W), float32 in [0, 1], colours as RGB; "
        "their normalisation is in the network",
        "output": "logits (batch, classes)",
        "model": config.model.name,
        "method": config.method.name,
        "data": config.data.name,
        "threat": trained,
        "accuracy": known.accuracy if known else {},
        "accuracy_from": f"{known.file}, {known.images} images" if known else "not measured",
        "accuracy_under": {**trained, **({"eps": evaluated["about"]["eps"]} if evaluated else {})},
        "weights_sha256": files.file_digest(saved.weights),
        "made_by": f"yopo-torch {yopo.__version__}",
    }
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in words.items()}


# ---------------------------------------------------------------- the formats


def _packed(net: nn.Module, image: Tensor, to: str, words: dict[str, str]) -> bytes:
    """The file. Its batch may have any size; two images are traced, since one is a special case."""
    x = image.expand(2, *image.shape[1:]).float() / 255
    shapes = ({0: torch.export.Dim("batch")},)
    size = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    if to == "onnx":
        if size > LARGEST:
            raise ValueError(
                "an ONNX file ends at 2 GB, and these weights are larger; use --to pt2"
            )
        for name in ("onnx", "onnxscript"):
            _needed(name)
    buffer = io.BytesIO()
    with _quiet():
        try:
            if to == "pt2":
                program = torch.export.export(net, (x,), dynamic_shapes=shapes)
                torch.export.save(program, buffer, extra_files=dict(words))
                return buffer.getvalue()
            onnx = torch.onnx.export(
                net,
                (x,),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=[IMAGE],
                output_names=[LOGITS],
                verbose=False,
            )
            assert onnx is not None
            onnx.model.metadata_props.update(words)
            packed: bytes = onnx.model_proto.SerializeToString()
            return packed
        except Exception as error:  # whatever torch, or the user's own code, makes of it
            raise ValueError(
                f"this network cannot be exported to {to}: {_cause(error)}; its forward pass must "
                "be one graph, in which no number of a batch decides what is done next"
            ) from None


def read_words(path: Path) -> dict[str, str]:
    """What `about` put into a file, that you made yourself: pt2 files are read by torch."""
    if path.suffix == ".onnx":
        entries = _needed("onnx").load(path).metadata_props
        return {entry.key: entry.value for entry in entries}
    words = dict.fromkeys(WORDS, "")
    torch.export.load(path, extra_files=words)
    return words


def _judge(packed: bytes, to: str) -> Judge | None:
    """The file as whoever gets it runs it; None where nothing here can."""
    if to == "pt2":
        with _quiet():
            module = torch.export.load(io.BytesIO(packed)).module()
        return lambda x: module(x)
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(packed, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run([LOGITS], {IMAGE: x.numpy()})[0])


def _needed(name: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"exporting to ONNX needs {name}: pip install 'yopo-torch[onnx]'"
        ) from None


def _cause(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:200].rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own notes to its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------- beside the network


def compare(judge: Judge, net: nn.Module, shape: tuple[int, ...], to: str) -> float:
    """The largest difference of a logit on random images; a ValueError if that is no rounding."""
    x = torch.rand(COMPARED, *shape, generator=_seeded(0), dtype=torch.float32)
    worst = 0.0
    with torch.no_grad():
        for batch in (x[:1], x[1:3], x[3:]):
            mine = net(batch)
            try:
                difference = float((judge(batch) - mine).abs().max())
            except Exception as error:
                raise ValueError(
                    f"the {to} file does not take {len(batch)} images: {_cause(error)}; "
                    "it was not kept"
                ) from None
            if not difference <= NEAR * max(1.0, float(mine.abs().max())):
                raise ValueError(
                    f"the {to} file answers otherwise than the network: a logit differs by "
                    f"{difference:.2g}; it was not kept"
                )
            worst = max(worst, difference)
    return worst


class _Module(nn.Module):
    """An exported module among others; it has one mode, the one that it was exported in."""

    def __init__(self, answer: Judge) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.answer(x)


def judged(
    judge: Judge, attacked: nn.Module, x: Tensor, y: Tensor, threat: Linf | L2, seed: int
) -> str:
    """Accuracies of the file, and on which network the adversarial images were made."""
    right = {"clean": 0, "file": 0, "network": 0}
    parameter, step = next(attacked.parameters(), x), step_size(threat, STEPS)
    generator = _seeded(seed, parameter.device)
    own = isinstance(attacked, _Module)
    for some, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        there, answers = some.to(parameter.device), labels.to(parameter.device)
        hostile = pgd(attacked, there, answers, threat, steps=STEPS, step=step, generator=generator)
        with torch.no_grad():
            right["clean"] += int((judge(some).argmax(1) == labels).sum())
            right["file"] += int((judge(hostile.cpu()).argmax(1) == labels).sum())
            right["network"] += int((attacked(hostile).argmax(1) == answers).sum())
    share = {k: f"{many / len(x):.1%}" for k, many in right.items()}
    first = f"{len(x)} test images: {share['clean']} right without an attack, {share['file']} under"
    what = f"PGD-{STEPS} ({norm(threat)})"
    if own:
        return f"{first} {what}, which attacked the exported file itself"
    return (
        f"{first} {what}; the attack made its images on the run's own network ({share['network']} "
        "right there), and the exported file judged them"
    )


def _seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
