"""What a person sees who prints an object, or asks for help."""

import inspect

import pytest
import torch

import yopo
from tests.conftest import Batch, convnet
from yopo.methods.registry import ENTRIES, Entry


@pytest.mark.parametrize(
    ("threat", "shown"),
    [
        (yopo.Linf(8 / 255), "Linf(eps=8/255, step=2/255)"),
        (yopo.Linf(0.3, 0.01), "Linf(eps=0.3, step=0.01)"),
        (yopo.L2(0.5), "L2(eps=0.5, step=0.125)"),
        (yopo.Linf(0.1).resized(torch.tensor(0.25), torch.tensor(0.5)), "Linf(eps=0.25, step=0.5)"),
    ],
)
def test_a_threat_is_what_makes_it_again(threat: yopo.Linf | yopo.L2, shown: str) -> None:
    assert repr(threat) == shown


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_a_method_and_what_it_did_are_one_line(entry: Entry, batch: Batch) -> None:
    net = convnet()
    threat, optimizer = yopo.Linf(8 / 255), torch.optim.SGD(net.parameters(), 0.1)
    loss = torch.nn.functional.cross_entropy
    method = entry.build(net, {}, threat=threat, optimizer=optimizer, loss=loss)
    shown = repr(method)
    assert shown.startswith(f"{type(method).__name__}({type(net).__name__}")
    assert ("Linf(eps=8/255, step=2/255)" in shown) == (entry.name != "natural")
    out = method.backward(*batch)
    for text in (shown, repr(out)):
        assert "\n" not in text
        assert "tensor" not in text
        assert len(text) < 160
    assert repr(out).startswith(
        f"Step(loss {float(out.loss):.4g}, logits {tuple(out.logits.shape)}"
    )


@pytest.mark.parametrize("decay", [None, 0.998])
def test_an_engine_is_one_line_that_says_how_it_steps(
    decay: float | None, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = convnet()
    method, optimizer = yopo.YOPO(net, yopo.Linf(8 / 255)), torch.optim.SGD(net.parameters(), 0.1)
    ema = None if decay is None else yopo.EMA(net, decay)
    engine = yopo.Engine(method, optimizer, ema=ema, compile=False, capture=False)
    average = "" if ema is None else f"{ema}, "
    assert not ema or repr(ema) == f"EMA({type(net).__name__}, decay=0.998)"
    assert repr(engine) == f"Engine({method}, SGD, {average}float32, no step yet)"
    engine.step(*batch)
    assert repr(engine) == f"Engine({method}, SGD, {average}float32, plain)"
    for how in ("compiled", "captured"):
        monkeypatch.setattr(yopo.Engine, how, True)
        assert repr(engine) == f"Engine({method}, SGD, {average}float32, {how})"


def test_yopo_is_explained_with_an_example() -> None:
    text = inspect.getdoc(yopo.YOPO) or ""
    for name in inspect.signature(yopo.YOPO).parameters:
        assert f"{name}:" in text, name
    code = text.split("\n\n")[2]
    x, y = torch.rand(4, 3, 8, 8, dtype=torch.float64), torch.arange(4) % 3
    net = convnet()
    before = [p.clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    names = {"yopo": yopo, "model": net, "loader": [(x, y)], "optimizer": optimizer}
    exec(inspect.cleandoc(code), names)
    assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_dir_has_the_public_names_alone() -> None:
    assert [name for name in dir(yopo) if name != "__version__"] == sorted(yopo.__all__)
