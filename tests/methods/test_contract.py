"""What the engine, the trainer and checkpoints may ask of a method: what `Method` says, no more."""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import yopo
from tests.conftest import Batch, assert_same, bn_convnet, convnet, grads
from tests.methods.test_methods import THREAT, Make, every_method
from yopo import PGD, YOPO, Engine, Free, Method
from yopo.methods.base import AdversarialMethod, carried_over
from yopo.methods.registry import ENTRIES

PACKAGE = Path(yopo.__file__).parent
MAKERS = ("__init__.py",)  # the public names


def concrete(kind: type[Method] = Method) -> set[str]:
    """Names of the methods that the package defines."""
    found = {name for each in kind.__subclasses__() for name in concrete(each)}
    ours = kind.__module__.startswith("yopo.methods.") and not kind.__subclasses__()
    return found | ({kind.__name__} if ours else set())


def test_no_concrete_method_is_named_outside_their_room() -> None:
    for name in yopo.__all__:
        getattr(yopo, name)  # loads it
    names = concrete()
    assert names == {
        "Natural", "PGD", "Free", "Fast", "NFGSM", "TRADES", "YOPO", "TRADESYOPO", "PMP",
    }  # fmt: skip
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name == "methods" or file in [PACKAGE / name for name in MAKERS]:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            used: set[str] = set()
            if isinstance(node, ast.ImportFrom | ast.Import):
                used = {alias.name.rpartition(".")[2] for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = {node.attr} if node.value.id in ("yopo", "methods") else set()
            assert not used & names, f"{file.relative_to(PACKAGE)} names {used & names}"


# Where a method's name stands as a word outside their room, and why.
NAMED = {
    "attacks/__init__.py": {"pgd"},  # an attack
    "attacks/names.py": {"pgd"},
    "evaluation/evaluate.py": {"pgd"},
    "evaluation/card.py": {"pgd"},
    "__init__.py": {"pmp"},  # a room
    "runs/recipes.py": {"fast", "natural"},  # a recipe's method, and a row of table 3
    "bench/literal.py": {*ENTRIES},  # the paper's loops, by what they are compared with
    "runs/settings.py": {"yopo"},  # by default
    "cli/bench.py": {"natural"},  # a column
    "cli/diagnose.py": {"pgd"},  # a part of the study's file
}


def test_no_method_is_asked_for_by_its_name() -> None:
    """What reports, bench and recipes ask of a method is in the registry."""
    for file in PACKAGE.rglob("*.py"):
        tree, where = ast.parse(file.read_text()), str(file.relative_to(PACKAGE))
        allowed = NAMED.get(where, set())
        if file.parent.name == "methods":
            continue
        for node in ast.walk(tree):
            used = {node.value} & {*ENTRIES} if isinstance(node, ast.Constant) else set()
            assert not used - allowed - {"yopo"}, f"{where} names {used}"  # which we are, too
            asks = isinstance(node, ast.Compare | ast.Match)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                asks = node.func.attr in ("startswith", "removeprefix", "endswith")
            if asks and where != "__main__.py":
                words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not words & {*ENTRIES} - allowed, f"{where}: {ast.unparse(node)}"


HELD = re.compile(r"(self\.|learner\.)*_?(method|fast|plain)|running|form")  # in the source
ASKING = ("runs/learner.py", "runs/trainer.py", "runs/epoch_end.py", "runs/snapshot.py")


def test_others_ask_a_method_for_what_it_says_they_do() -> None:
    """The list stands in its docstring."""
    asked: set[str] = set()
    for file in (*(PACKAGE / "engine").glob("*.py"), *(PACKAGE / name for name in ASKING)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and HELD.fullmatch(ast.unparse(node.value)):
                asked.add(node.attr)
    said = {*re.findall(r"`(\w+)`", (Method.__doc__ or "").partition("steps its")[2])}
    attributes = {name for name in Method.__annotations__ if hasattr(Method, name)}
    attributes |= {name for name, value in vars(Method).items() if isinstance(value, bool)}
    assert len(attributes) == 6
    assert asked - attributes == said - attributes


def test_the_engine_leaves_private_parts_alone() -> None:
    """Of a method, and of what it is made of."""
    for file in (PACKAGE / "engine").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            private = isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
            if private and isinstance(node, ast.Attribute):
                of = ast.unparse(node.value).rpartition(".")[2]
                assert not of.endswith("method"), f"{file.name}: {ast.unparse(node)}"


@every_method
def test_another_form_is_the_same_method(make: Make, batch: Batch) -> None:
    """As on a compiled network: another module, the same parameters."""
    x, y = batch
    net = bn_convnet()
    method, of_twin = make(net), make(copy.deepcopy(net))
    if method.layer_by_layer:
        return
    other = torch.nn.Sequential(of_twin.model)
    cut = of_twin.cut(x)
    split = None if cut is None else yopo.Split(other, f"0.{cut.name}")
    form = of_twin.on(other, threat=of_twin.threat, loss=of_twin.loss, split=split)
    ends = []
    for each in (method, form):
        torch.manual_seed(0)
        each.prepare(x, y)
        ends.append(each.run(x, y))
    torch.testing.assert_close(ends[1].eta, ends[0].eta)
    torch.testing.assert_close(ends[1].loss, ends[0].loss)
    assert_same(grads(of_twin.model), grads(net))
    assert form.settings() == method.settings()


@every_method
def test_what_is_carried_goes_on_in_another(make: Make, batch: Batch) -> None:
    x, y = batch
    method, other = make(convnet()), make(convnet())
    method.backward(x, y)
    state = method.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.load_state_dict({})
    assert other.state_dict() == {}


def test_only_free_carries_and_steps(batch: Batch) -> None:
    net = convnet()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    free = Free(net, THREAT, m=2, optimizer=optimizer)
    assert free.optimizer is optimizer
    out = free.backward(*batch)
    assert torch.equal(free.state_dict()["eta"], out.eta)
    assert PGD(net, THREAT).optimizer is None
    with pytest.raises(ValueError, match="PGD carries nothing, got eta"):
        PGD(net, THREAT).load_state_dict(free.state_dict())


def test_what_is_carried_fits_the_batch() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(carried_over(rows, torch.ones(2, 2)), rows[:2])
    assert torch.equal(carried_over(rows, torch.ones(4, 2)), torch.cat([rows, torch.zeros(1, 2)]))
    assert not carried_over(rows, torch.ones(3, 1)).any()
    assert not carried_over(None, torch.ones(3, 2)).any()


class Momentum(AdversarialMethod):
    """A method of somebody's own: its adversary goes on from an average of gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, THREAT, loss=None, generator=None)
        self.average: torch.Tensor | None = None

    def _run(self, x: torch.Tensor, y: torch.Tensor, eta: torch.Tensor | None) -> yopo.Step:
        eta = torch.zeros_like(x) if eta is None else eta
        split = YOPO(self.model, THREAT).split
        at = split.propagate(x + eta, lambda z: F.cross_entropy(z, y), weights=None)
        self.average = 0.5 * carried_over(self.average, x) + at.grad
        eta = THREAT.ascend(eta, self.average, x)
        return PGD(self.model, THREAT, steps=1)._run(x, y, eta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.average = state.get("average")


def test_the_engine_carries_what_it_does_not_know(batch: Batch) -> None:
    """Batches of another size come in between; the tensor stays where it is."""
    x, y = batch
    nets = [convnet()]
    nets.append(copy.deepcopy(nets[0]))
    batches = [(x, y), (x[:4], y[:4]), (x.flip(0), y), (x, y)]
    plain = Momentum(nets[0])
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    engine = Engine(Momentum(nets[1]), optimizers[1], compile=False)
    for i, (images, labels) in enumerate(batches):
        plain.backward(images, labels)
        if i == 1:  # as the engine keeps it: filled up to the size of the first batch
            assert plain.average is not None
            plain.average = carried_over(plain.average, x)
        optimizers[0].step()
        optimizers[0].zero_grad()
        engine.step(images, labels)
        if i == 0:
            there = engine.method.state_dict()["average"]
    assert engine.method.state_dict()["average"] is there
    assert_same(dict(nets[1].state_dict()), dict(nets[0].state_dict()))
