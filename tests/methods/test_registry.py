"""The registry: every method is in it once, and what it says of each is so."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yopo
from tests.conftest import Batch, convnet
from yopo import Method
from yopo.methods import registry
from yopo.methods.registry import ENTRIES, Entry, Setting, read, register, said
from yopo.runs.build import build_method, out_of_reach
from yopo.runs.schemas import ConfigFile
from yopo.runs.settings import fields, validate


@pytest.fixture
def mine() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(ENTRIES)
    yield
    ENTRIES.clear()
    ENTRIES.update(before)


def test_every_method_is_there_once() -> None:
    public = [getattr(yopo, name) for name in yopo.__all__]
    methods = {c for c in public if inspect.isclass(c) and issubclass(c, Method)}
    declared = [entry.method for entry in ENTRIES.values()]
    assert {*declared} == {c for c in methods if not inspect.isabstract(c)}
    assert len(declared) == len({*declared})


@pytest.mark.parametrize(
    ("spec", "settings", "label"),
    [
        ("natural", {}, "Natural"),
        ("fast", {}, "FGSM-RS"),
        ("nfgsm", {}, "N-FGSM"),
        ("pgd-10", {"steps": 10}, "PGD-10"),
        ("trades-10", {"steps": 10}, "TRADES-10"),
        ("free-8", {"m": 8}, "Free-8"),
        ("yopo-5-3", {"m": 5, "n": 3}, "YOPO-5-3"),
        ("yopo-5-0", {"m": 5, "n": 0}, "YOPO-5-0"),
        ("yopo-5-3-before", {"m": 5, "n": 3, "grad_at": "before"}, "YOPO-5-3 before"),
        ("yopo-5-3-last", {"m": 5, "n": 3, "grad_at": "last"}, "YOPO-5-3 last"),
        ("yopo-last", {"grad_at": "last"}, "YOPO-5-3 last"),
        ("trades-yopo-3-4", {"m": 3, "n": 4}, "TRADES-YOPO-3-4"),
        ("pmp", {}, "PMP-5"),
        ("pmp-2", {"m": 2}, "PMP-2"),
    ],
)
def test_a_spec_gives_settings_and_they_a_label(
    spec: str, settings: dict[str, Any], label: str
) -> None:
    entry, given = read(spec)
    assert given == settings
    config = validate({"method": {"name": entry.name} | given})
    assert said(config.method.model_dump()) == label


def test_another_versions_method_has_a_label_too() -> None:
    assert said({"name": "yopo", "m": 5, "n": 3}) == "YOPO-5-3"  # from before grad_at
    assert said({"name": "theirs", "m": 5, "k": 3}) == "THEIRS-5"
    assert said({"name": "yopo", "m": "five", "n": 3, "grad_at": "<b>"}) == "YOPO-3"


@pytest.mark.parametrize(
    ("method", "sound"),
    [
        ({"name": "pgd", "steps": 5}, True),
        ({"name": "pgd", "m": "five"}, True),  # no number of its label
        ({"name": "pgd", "steps": "five"}, False),
        ({"name": "yopo", "m": True, "n": 3}, False),
        ({"name": "yopo", "m": 5, "n": -1}, False),
        ({"name": "theirs", "steps": [5]}, False),
    ],
)
def test_in_a_run_the_numbers_of_a_label_are_whole(method: dict[str, Any], sound: bool) -> None:
    config: dict[str, Any] = {k: {"name": "x"} for k in ("data", "model")}
    config |= {"method": method, "threat": {"name": "linf", "eps": 0.1}, "evaluate": {"steps": 1}}
    config |= {"epochs": 1, "seed": 0}
    if sound:
        ConfigFile.model_validate(config, strict=True)
    else:
        with pytest.raises(ValueError, match="expected whole numbers"):
            ConfigFile.model_validate(config, strict=True)


def test_examples_in_a_sentence_are_specs_with_their_defaults() -> None:
    for entry in ENTRIES.values():
        entry.check()
        found, given = read(entry.example)
        assert found is entry
        assert given == {k: entry.parameters[k].default for k in given}
        assert len(given) == len(entry.numbers)


class Counting:
    """L∞, and how many of its own steps were taken."""

    def __init__(self, ball: yopo.Linf) -> None:
        self.ball, self.taken = ball, 0
        self.eps, self.step = ball.eps, ball.step

    def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.ball.start(x, generator)

    def project(self, eta: Tensor, x: Tensor) -> Tensor:
        return self.ball.project(eta, x)

    def ascend(
        self, eta: Tensor, grad: Tensor, x: Tensor, *, n: int = 1, step: float | None = None
    ) -> Tensor:
        self.taken += n if step is None else 0
        return self.ball.ascend(eta, grad, x, n=n, step=step)


@pytest.mark.parametrize("name", [n for n in ENTRIES if n not in ("nfgsm", "pmp")])
def test_the_steps_of_a_batch_are_counted_right(name: str, batch: Batch) -> None:
    """Of size threat.step; FGSM-RS and Free have steps of their own."""
    entry, net = ENTRIES[name], convnet()
    threat = Counting(yopo.Linf(0.1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    method = entry.build(net, {}, threat=threat, optimizer=optimizer, loss=F.cross_entropy)
    method.backward(*batch)
    defaults = {k: p.default for k, p in entry.parameters.items()}
    assert threat.taken == entry.steps(defaults)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"name": "pgd", "steps": 3}, 3),
        ({"name": "trades", "steps": 2}, 2),
        ({"name": "yopo", "m": 3, "n": 1}, 3),
        ({"name": "trades-yopo", "m": 1, "n": 2}, 2),
        ({"name": "free", "m": 1}, None),
        ({"name": "fast"}, None),
        ({"name": "pmp", "m": 1}, None),
        ({"name": "natural"}, None),
    ],
)
def test_an_adversary_that_cannot_reach_the_surface_is_told(
    flags: dict[str, object], steps: int | None
) -> None:
    told = out_of_reach(validate({"method": flags, "threat": {"eps": 0.3, "step": 0.09}}))
    assert told is None if steps is None else (told or "").startswith(f"{steps} steps of 0.09 add")


@pytest.mark.parametrize("name", ["yopo", "trades-yopo"])
def test_an_adversary_without_steps_is_told(name: str) -> None:
    told = out_of_reach(validate({"method": {"name": name, "m": 3, "n": 0}}))
    assert told == "n = 0: the adversary takes no steps, so this trains on random noise"


class Wide(yopo.AdversarialMethod):
    """A setting of every kind, some that are none, and no algorithm."""

    def __init__(
        self,
        model: torch.nn.Module,
        threat: yopo.Threat,
        *,
        count: int = 2,
        size: float | None = None,
        how: Literal["a", "b"] = "a",
        word: str = "w",
        flag: bool = False,
        layers: list[str] | None = None,
        rule: Callable[[Tensor], Tensor] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=None)
        self.given = (count, size, how, word, flag, layers)

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> yopo.Step:
        raise NotImplementedError


@pytest.mark.usefixtures("mine")
def test_settings_come_from_the_signature() -> None:
    register(
        Entry("wide", Wide, ("count",), ending="how", settings={"size": Setting("x", above=0)})
    )
    assert [row for row in fields() if "(wide)" in row[2]] == [
        ("method.count", "2", "(wide)"),
        ("method.size", "", "(wide) x"),
        ("method.how", "a", "(wide) a or b"),
        ("method.word", "w", "(wide)"),
        ("method.flag", "False", "(wide)"),
        ("method.layers", "", "(wide)"),
    ]
    assert read("wide-7-b")[1] == {"count": 7, "how": "b"}
    assert said({"name": "wide", "count": 7, "how": "b"}) == "WIDE-7 b"
    words = {"count": "-3", "size": "8/255", "how": "b", "flag": "true", "layers": "p,q"}
    config = validate({"method": {"name": "wide"} | words})
    net = convnet()
    method = build_method(config, net, torch.optim.SGD(net.parameters(), 0.1))
    assert isinstance(method, Wide)
    assert method.given == (-3, 8 / 255, "b", "w", True, ["p", "q"])
    assert validate(config.tree()) == config
    for wrong, told in (
        ({"size": "0"}, "greater than 0"),
        ({"size": "nan"}, "greater than 0"),
        ({"count": "1.5"}, "valid integer"),
        ({"rule": "x"}, "no setting method.rule"),
        ({"loss": "x"}, "no setting method.loss"),
    ):
        with pytest.raises(ValueError, match=told):
            validate({"method": {"name": "wide"} | wrong})


def takes(**parameters: Any) -> type[Method]:
    """A method with these parameters."""

    class Made(Wide):
        pass

    kinds = {
        "bare": inspect.Parameter.KEYWORD_ONLY,
        "name": inspect.Parameter.KEYWORD_ONLY,
        "other": inspect.Parameter.VAR_KEYWORD,
    }
    Made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(k, kinds.get(k, inspect.Parameter.POSITIONAL_OR_KEYWORD), **v)
            for k, v in parameters.items()
        ]
    )
    return Made


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (lambda: Entry("Mine", Wide), "lower-case letters, as trades-yopo, got 'Mine'"),
        (lambda: Entry("mine-3", Wide), "lower-case letters"),
        (lambda: Entry("mine", Wide, ("k",)), "Wide has no setting 'k'; there are: count, size"),
        (lambda: Entry("mine", Wide, settings={"rule": Setting()}), "no setting 'rule'"),
        (lambda: Entry("mine", Wide, ending="loss"), "no setting 'loss'"),
        (lambda: Entry("mine", takes(k={"annotation": int, "default": 1})), "expected k of Made"),
        (lambda: Entry("mine", takes(bare={"annotation": int})), "with a type and a default"),
        (lambda: Entry("mine", takes(bare={"default": 3})), "with a type and a default"),
        (lambda: Entry("mine", Wide, ending="word"), "expected Literal choices of word"),
        (lambda: Entry("mine", takes(name={"annotation": str, "default": "x"})), "called name"),
        (lambda: Entry("mine", takes(other={})), "expected other of Made by name"),
    ],
)
def test_what_cannot_be_read_is_refused(entry: Callable[[], Entry], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        entry()


@pytest.mark.usefixtures("mine")
def test_ours_stay_and_your_own_may_change() -> None:
    with pytest.raises(TypeError, match=r"expected a class made from yopo\.Method"):
        Entry("mine", torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"yopo is yopo\.YOPO; give yours another name"):
        register(Entry("yopo", Wide))
    register(Entry("mine", Wide, ("count",)))
    register(Entry("mine", Wide, settings={"count": Setting(least=5)}))
    with pytest.raises(ValueError, match="greater than or equal to 5"):
        validate({"method": {"name": "mine", "count": 3}})
    assert registry.read("mine")[0].numbers == ()
