"""The engine in two processes (gloo): the same steps as without it, in both or in none."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD

import yopo
from tests.conftest import GPU, Batch, assert_same, bn_convnet, convnet, without_kernels
from tests.tiny import PATIENCE, as_one_of, in_two, tiny_trainer, weights
from yopo.core.exchange import agreed
from yopo.engine import forms
from yopo.engine.capture import Capture, CutOffError
from yopo.runs.progress import Progress

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:\\s*Online softmax",
    "ignore:The .grad attribute of a Tensor",
)
THREAT = yopo.Linf(0.1)
STEPS = 3
Make = Callable[[nn.Module, SGD], yopo.Method]
METHODS: dict[str, Make] = {
    "natural": lambda net, _: yopo.Natural(net),
    "yopo": lambda net, _: yopo.YOPO(net, THREAT, m=2, n=2),
    "free": lambda net, optimizer: yopo.Free(net, THREAT, m=2, optimizer=optimizer),
}


def batch(rank: int, step: int) -> Batch:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(6, 3, 8, 8, generator=g), torch.arange(6) % 4


def sgd(net: nn.Module) -> SGD:
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    yopo.exchange_gradients(optimizer)
    return optimizer


def network(make: Callable[[], nn.Module] = bn_convnet) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plainly(net: nn.Module, make: Make, rank: int) -> nn.Module:
    optimizer = sgd(net)
    method = make(net, optimizer)
    torch.manual_seed(rank)
    for step in range(STEPS):
        method.backward(*batch(rank, step))
        optimizer.step()
        optimizer.zero_grad()
    return net


def by_engine(net: nn.Module, make: Make, rank: int, said: list[str]) -> yopo.Engine:
    optimizer = sgd(net)
    engine = yopo.Engine(make(net, optimizer), optimizer, say=said.append)
    torch.manual_seed(rank)
    for step in range(STEPS):
        engine.step(*batch(rank, step))
    return engine


# ------------------------------------------------------------ in each of the two processes


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each collective is called in the block."""
    sent = {"all_reduce": 0, "broadcast": 0, "all_gather": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in sent:
            real = getattr(dist, name)

            def call(*args: Any, name: str = name, real: Any = real, **given: Any) -> Any:
                sent[name] += 1
                return real(*args, **given)

            patch.setattr(dist, name, call)
        yield sent


def messages(rank: int) -> dict[str, Any]:
    """What getting ready sends, and what each step does."""
    net, found = network(), dict[str, Any]()
    optimizer = sgd(net)
    engine = yopo.Engine(yopo.YOPO(net, THREAT, m=3, n=1), optimizer)
    with counted() as sent:
        engine.prepare(*batch(rank, 0))
        found["prepare"] = dict(sent)
        engine.step(*batch(rank, 0))
        found["first"] = dict(sent)
        engine.add(*batch(rank, 1))
        engine.step(*batch(rank, 2))
        found["second"] = dict(sent)
    return found


def accumulated(rank: int, engine: str) -> dict[str, Tensor]:
    """By the trainer, two batches a step, averaged."""
    over: dict[str, Any] = {"engine": engine, "optimizer": {"accumulate": 2, "clip": 0.2}}
    model = {"options": {"width": 4, "size": 16, "hidden": 8, "dropout": 0.0}}
    trainer = tiny_trainer(Path("none"), over | {"model": model, "batch": 12})
    learner, p = trainer.learner, Progress()
    for step, (x, y) in enumerate(trainer.loader.epoch(0)):
        learner.step(x.double(), y, p, step, 5)
        if step == 4:  # the last step of the epoch has one batch alone
            break
    assert (learner.engine is not None and learner.engine.compiled) == (engine == "compiled")
    assert p.updates == 3
    return weights(learner.follower) | {"weight": learner.model.state_dict()["conv1.weight"]}


def failing(rank: int, where: int) -> dict[str, Any]:
    """In one process nothing compiles."""
    made, said, real = list[int](), list[str](), forms.compiled_form

    def form(*args: Any, **given: Any) -> Any:
        made.append(rank)
        if rank == where:
            raise RuntimeError("no compiler here")
        return real(*args, **given)

    net, twin = network(), network()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("yopo.engine.ready.compiled_form", form)
        engine = by_engine(net, METHODS["yopo"], rank, said)
    plainly(twin, METHODS["yopo"], rank)
    return {
        "said": said,
        "made": made,
        "compiled": engine.compiled,
        "net": weights(net),
        "twin": weights(twin),
    }


def staged(rank: int, broken: int | None) -> dict[str, Any]:
    """Capture, a GPU's part played by a graph that runs the step; in one process a stage fails."""
    net, said, began = network(), list[str](), list[int]()
    optimizer, recording = sgd(net), [False]
    method = yopo.YOPO(net, THREAT, m=2, n=1)
    engine = yopo.Engine(method, optimizer, compile=False, capture_exchange=True, say=said.append)
    engine.step(*batch(rank, 0))
    sent = list[int]()
    before, real, together = weights(net), dist.all_reduce, engine._ready.together

    class Graph:
        def replay(self) -> None:
            capture = engine._capture
            capture._out = engine._steps.take(engine._steps.fast, capture._x, capture._y)

    @contextmanager
    def record(*_: object, **__: object) -> Iterator[None]:
        recording[0] = True
        yield
        recording[0] = False

    def all_reduce(tensor: Tensor) -> Any:
        if recording[0]:  # as in a capture: nothing is sent
            return None
        sent.append(tensor.numel())
        return real(tensor)

    def stage(work: Callable[[], object]) -> object:
        began.append(len(sent))

        def fails() -> object:
            work()
            raise RuntimeError("too little room")

        return together(fails if (rank, len(began) - 1) == (1, broken) else work)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "current_stream", "default_generators"):
            patch.setattr(torch.cuda, name, MagicMock())
        patch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
        patch.setattr(torch.cuda, "graph", record)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(engine._ready, "together", stage)
        engine._ready.record(*batch(rank, 0))
    unchanged = all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    captured = engine.captured
    engine.step(*batch(rank, 1))
    return {
        "began": began,
        "said": said,
        "captured": captured,
        "unchanged": unchanged,
        "net": dict(net.named_parameters()),
    }


def cut_off(rank: int) -> dict[str, Any]:
    """In the second process the step that is to be captured fails before it sends anything."""
    net, said, sent = network(), list[str](), list[int]()
    optimizer = sgd(net)
    method = yopo.YOPO(net, THREAT, m=2, n=1)
    engine = yopo.Engine(method, optimizer, compile=False, capture_exchange=True, say=said.append)
    engine.step(*batch(rank, 0))
    real, work, ends = dist.all_reduce, engine._steps.first, ""

    def all_reduce(tensor: Tensor) -> Any:
        sent.append(tensor.numel())
        return real(tensor)

    def fails(x: Tensor, y: Tensor) -> yopo.Step:
        if rank and sent:  # warm-ups are over: the processes have agreed on them
            raise MemoryError("too little room")
        return work(x, y)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "current_stream", "default_generators"):
            patch.setattr(torch.cuda, name, MagicMock())
        patch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(engine._steps, "first", fails)
        try:
            engine._ready.record(*batch(rank, 0))
        except CutOffError as error:
            ends = str(error)
    if rank:  # it would end, and the other with it; here it sends what that one waits for
        real(torch.zeros(sum(1 + p.numel() for p in net.parameters())))
        agreed("it is gone")
    return {"sent": sent, "ends": ends, "said": said}


def kept(rank: int, folder: str) -> dict[str, int]:
    """What the compiler found of what the other had compiled, kernels and all."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._dynamo.reset()
    counters.clear()
    by_engine(network(convnet), METHODS["natural"], rank, [])
    found = counters["inductor"]
    return {name: found[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}


def work(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    as_one_of(2, rank, port)
    # What cannot be exchanged would wait for ever.
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE / 2))
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, without_kernels(patch):
        for name, make in METHODS.items():
            net, said = network(), list[str]()
            engine = by_engine(net, make, rank, said)
            plain = plainly(network(), make, rank)
            found[name] = weights(net), weights(plain), engine.compiled, said
        found["messages"] = messages(rank)
        found["cut off"] = cut_off(rank)
        found["staged"] = [staged(rank, broken) for broken in (None, 0, 1, 2, 3)]
        found["failing"] = [failing(rank, where) for where in (0, 1)]
        found["accumulated"] = [accumulated(rank, engine) for engine in ("compiled", "plain")]
    found["agreed"] = agreed("too little room" if rank else ""), agreed("é" * 400), agreed("")
    found["kept"] = kept(rank, f"{out}/kernels")
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


# ------------------------------------------------------------ and what they found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two(work, tmp_path_factory.mktemp("several"))


@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_without_it(method: str, found: list[dict[str, Any]]) -> None:
    for net, plain, compiled, said in (each[method] for each in found):
        assert compiled
        assert not said
        assert_same(net, plain, tol=1e-9)
    mine, others = (each[method][0] for each in found)
    for name, value in mine.items():  # each normalises by its own share of the batch
        assert torch.equal(value, others[name]) or "running" in name


def test_the_trainer_accumulates_through_it(found: list[dict[str, Any]]) -> None:
    for compiled, plain in (each["accumulated"] for each in found):
        assert_same(compiled, plain, tol=1e-9)
    assert_same(found[0]["accumulated"][0], found[1]["accumulated"][0], tol=0)


def test_nothing_is_sent_before_all_have_agreed(found: list[dict[str, Any]]) -> None:
    """Once after each turn; then once a step, the first of which compares the weights, too."""
    for sent in (each["messages"] for each in found):
        assert sent["prepare"] == {"all_reduce": 2, "broadcast": 0, "all_gather": 0}
        assert sent["first"] == {"all_reduce": 3, "broadcast": 0, "all_gather": 1}
        assert sent["second"] == {"all_reduce": 4, "broadcast": 0, "all_gather": 1}


@pytest.mark.parametrize("where", [0, 1])
def test_where_one_cannot_compile_all_take_plain_steps(
    where: int, found: list[dict[str, Any]]
) -> None:
    for rank, each in enumerate(one["failing"][where] for one in found):
        assert each["said"] == [f"not compiled: process {where}: RuntimeError: no compiler here"]
        assert not each["compiled"]
        # The second is asked only when the first of the machine has succeeded.
        assert each["made"] == ([rank] if rank <= where else [])
        assert_same(each["net"], each["twin"], tol=1e-12)


def test_all_go_from_stage_to_stage_of_a_capture_together(found: list[dict[str, Any]]) -> None:
    """Warm-ups send nothing; one step does; recording does not; the replay does."""
    for each in (one["staged"][0] for one in found):
        assert each["began"] == [0, 1, 3, 4]
        assert each["captured"]
        assert not each["said"]
        assert each["unchanged"]
    mine, others = (each["staged"][0]["net"] for each in found)
    assert_same(mine, others, tol=0)


@pytest.mark.parametrize("broken", range(4))
def test_a_stage_that_fails_in_one_ends_it_in_all(broken: int, found: list[dict[str, Any]]) -> None:
    for each in (one["staged"][1 + broken] for one in found):
        assert len(each["began"]) == broken + 1
        why = "process 1: RuntimeError: too little room"
        assert each["said"] == [f"not captured as one CUDA graph: {why}"]
        assert not each["captured"]
        assert each["unchanged"]
    mine, others = (each["staged"][1 + broken]["net"] for each in found)
    assert_same(mine, others, tol=0)


def test_what_fails_before_it_is_sent_is_no_stage_that_all_leave(
    found: list[dict[str, Any]],
) -> None:
    """The other waits for gradients, and would take anything else that is sent for them."""
    first, second = (each["cut off"] for each in found)
    assert "(too little room), and the others may wait for what it did not send" in second["ends"]
    assert len(second["sent"]) == 1
    assert not second["said"]
    assert first["said"] == ["not captured as one CUDA graph: process 1: it is gone"]
    assert not first["ends"]


def test_all_hear_what_the_first_could_not_do(found: list[dict[str, Any]]) -> None:
    for one, long, none in (each["agreed"] for each in found):
        assert one == "process 1: too little room"
        assert long.startswith("process 0: éé")
        assert not none


def test_the_second_process_finds_what_the_first_compiled(found: list[dict[str, Any]]) -> None:
    first, second = (each["kept"] for each in found)
    assert first["miss"] > 0
    assert first["hit"] == 0
    assert second == {"hit": first["miss"], "miss": 0, "bypass": first["bypass"]}


# ------------------------------------------------------------ on a GPU


class TestOnAGPU:
    """What two would add is not seen; that the exchange can be part of the graph is."""

    pytestmark = GPU

    @pytest.mark.parametrize("method", METHODS)
    def test_the_exchange_is_part_of_the_graph(
        self, method: str, alone: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        net = network().to(alone)
        twin, said, sent = copy.deepcopy(net), list[str](), list[bool]()
        real = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **given: Any) -> Any:
            sent.append(torch.cuda.is_current_stream_capturing())
            return real(tensor, *args, **given)

        optimizer = sgd(net)
        engine = yopo.Engine(METHODS[method](net, optimizer), optimizer, say=said.append)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        engine.prepare(*(t.to(alone) for t in batch(0, 0)))
        assert said == []
        assert engine.captured
        assert sent.count(True) == (2 if method == "free" else 1)  # of its two replays
        sent.clear()
        torch.manual_seed(0)
        for step in range(STEPS):
            engine.step(*(t.to(alone) for t in batch(0, step)))
        assert not sent  # a replay calls nothing
        monkeypatch.undo()
        other = sgd(twin)
        plain = METHODS[method](twin, other)
        torch.manual_seed(0)
        for step in range(STEPS):
            plain.backward(*(t.to(alone) for t in batch(0, step)))
            other.step()
            other.zero_grad()
        assert_same(dict(net.state_dict()), dict(twin.state_dict()), tol=1e-6)

    def test_a_replay_that_goes_elsewhere_is_not_kept(
        self, alone: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def compare(*_: object) -> None:
            raise RuntimeError("elsewhere")

        monkeypatch.setattr(Capture, "_compare", compare)
        net, said = network().to(alone), list[str]()
        optimizer = sgd(net)
        engine = yopo.Engine(yopo.Natural(net), optimizer, say=said.append)
        before = weights(net)
        engine.prepare(*(t.to(alone) for t in batch(0, 0)))
        assert said == ["not captured as one CUDA graph: RuntimeError: elsewhere"]
        assert_same(dict(net.state_dict()), before, tol=0)
        assert engine.step(*(t.to(alone) for t in batch(0, 0))).loss.isfinite()
