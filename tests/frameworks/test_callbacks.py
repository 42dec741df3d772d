"""`yopo.integrations`: held-out robust accuracy in Lightning and transformers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import yopo
from tests.frameworks.loops import (
    THREAT,
    images,
    in_several,
    keeper,
    loader,
    network,
    page,
    same_bits,
)
from tests.frameworks.test_lightning import QUIET
from tests.frameworks.test_trainer import classifier, trainer

pytest.importorskip("lightning", reason="needs yopo-torch[lightning]")
pytest.importorskip("transformers", reason="needs yopo-torch[transformers]")
pytestmark = pytest.mark.filterwarnings("default")  # the frameworks' own

ATTACKS = ("clean", "pgd-3")


def held() -> tuple[torch.Tensor, torch.Tensor]:
    """Mostly right and mostly near the border, so that attacks make a difference."""
    x = images().tensors[0]
    return x, network()(x).argmax(1)


def held_by_the_classifier() -> tuple[torch.Tensor, torch.Tensor]:
    x = images().tensors[0]
    with torch.no_grad():
        z = classifier()(pixel_values=x).logits
    return x, (z - z.mean(0)).argmax(1)  # several classes


def expected(net: nn.Module) -> dict[str, float]:
    return dict(yopo.evaluate(net, held(), yopo.Linf(0.01), ATTACKS, checks=False).accuracy)


def fit(
    epochs: int, every: int, callbacks: bool = True, more: Sequence[Any] = (), **options: Any
) -> tuple[Any, nn.Module]:
    import lightning

    from yopo.integrations.lightning import RobustAccuracy

    torch.set_default_dtype(torch.float64)

    class Validated(page("lightning")["Robust"]):  # type: ignore[misc]
        def on_fit_start(self) -> None:
            self.history: list[dict[str, float]] = []

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

        def on_train_epoch_end(self) -> None:
            self.history.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    robust = RobustAccuracy(held(), yopo.Linf(0.01), ATTACKS, every)
    trainer = lightning.Trainer(
        **QUIET | {"max_epochs": epochs, "precision": "64-true"} | options,
        callbacks=[*more, robust] if callbacks else [],
    )
    model = Validated(network(), THREAT)
    trainer.fit(model, loader(4), loader(4))
    return model, model.network


def several(out: Path) -> None:
    """In each of two processes."""
    model, net = fit(1, 1, strategy="ddp", devices=2)
    seen = {k: torch.tensor(v) for k, v in model.history[0].items() if k.startswith("accuracy")}
    keeper(out)("all", dict(net.state_dict()) | seen)


def test_lightning_logs_what_an_evaluation_finds() -> None:
    model, net = fit(2, 1, devices=1)
    first, last = model.history
    found = expected(net)
    assert 0 < found["pgd-3"] < found["clean"]
    assert {k: v for k, v in last.items() if k.startswith("accuracy")} == pytest.approx(
        {f"accuracy_{name}": share for name, share in found.items()}
    )
    assert first["accuracy_pgd-3"] != last["accuracy_pgd-3"]


def test_lightning_trains_as_without_it_and_waits_for_its_turn() -> None:
    (model, with_it), (_, without) = fit(2, 2, devices=1), fit(2, 1, callbacks=False, devices=1)
    assert same_bits(dict(with_it.state_dict()), dict(without.state_dict()))
    assert ["accuracy_clean" in line for line in model.history] == [False, True]


def test_all_processes_of_lightning_log_the_same(tmp_path: Path) -> None:
    first, second = (each["all"] for each in in_several(__name__, tmp_path))
    assert same_bits(first, second)
    net = network()
    net.load_state_dict({k: v for k, v in first.items() if not k.startswith("accuracy")})
    for name, share in expected(net).items():
        assert math.isclose(first[f"accuracy_{name}"], share, rel_tol=1e-6)


def test_a_network_of_choice_is_measured() -> None:
    from yopo.integrations.lightning import inner

    module, net = nn.Linear(2, 2), network()
    assert inner(module) is module
    module.method = yopo.Natural(net)  # type: ignore[assignment]
    assert inner(module) is net


def test_transformers_metrics_hold_what_an_evaluation_finds(tmp_path: Path) -> None:
    from yopo.integrations.transformers import Logits, RobustAccuracy

    torch.set_default_dtype(torch.float64)
    x, net = images().tensors[0], classifier()
    with torch.no_grad():
        z = net(pixel_values=x).logits
        net.get_parameter("classifier.bias").sub_(z.mean(0))  # several classes
        data = x, (z - z.mean(0)).argmax(1)
    robust = RobustAccuracy(data, yopo.Linf(0.005), ATTACKS, every=2)
    one = trainer(net, tmp_path, 4, eval_strategy="epoch", num_train_epochs=2)
    one.add_callback(robust)

    def expected() -> dict[str, float]:
        done = yopo.evaluate(Logits(net), data, yopo.Linf(0.005), ATTACKS, checks=False)
        return {f"eval_accuracy_{name}": share for name, share in done.accuracy.items()}

    assert "eval_accuracy_clean" not in one.evaluate()
    metrics = one.evaluate()
    assert metrics.items() >= expected().items()
    assert 0 < metrics["eval_accuracy_pgd-3"] < metrics["eval_accuracy_clean"]
    one.train()
    lines = [line for line in one.state.log_history if "eval_loss" in line]
    assert ["eval_accuracy_pgd-3" in line for line in lines] == [False, True]
    assert lines[1].items() >= expected().items()


def test_the_trainer_keeps_the_most_robust_weights(tmp_path: Path) -> None:
    from yopo.integrations.transformers import Logits, RobustAccuracy

    torch.set_default_dtype(torch.float64)
    net, data = classifier(), held_by_the_classifier()
    options: dict[str, Any] = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 4,
    }
    one = trainer(net, tmp_path, 4, metric_for_best_model="accuracy_pgd-3", **options)
    one.add_callback(RobustAccuracy(data, yopo.Linf(0.005), ATTACKS))
    one.train()
    found = [line["eval_accuracy_pgd-3"] for line in one.state.log_history if "eval_loss" in line]
    assert found.index(max(found)) < 3  # not those of the end
    assert one.state.best_metric == max(found)
    kept: Any = type(net)
    best = Logits(kept.from_pretrained(one.state.best_model_checkpoint).double())
    result = yopo.evaluate(best, data, yopo.Linf(0.005), ATTACKS, checks=False)
    assert result.accuracy["pgd-3"] == max(found)


@pytest.mark.parametrize("chosen", ["accuracy_pgd-3", "eval_accuracy_pgd-3", "loss", None])
def test_what_is_chosen_by_is_measured_each_time(chosen: str | None, tmp_path: Path) -> None:
    """Else the Trainer would break off at the first evaluation without it."""
    from yopo.integrations.transformers import RobustAccuracy

    torch.set_default_dtype(torch.float64)
    one = trainer(classifier(), tmp_path, 4, eval_strategy="epoch", metric_for_best_model=chosen)
    one.add_callback(RobustAccuracy(held(), yopo.Linf(0.005), ATTACKS, every=2))
    if chosen in ("loss", None):
        one.train()
        return
    with pytest.raises(ValueError, match=r"for accuracy_pgd-3 in every evaluation.* take every=1"):
        one.train()


def test_lightning_keeps_the_most_robust_weights_of_those_measured(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    options: dict[str, Any] = {"monitor": "accuracy_pgd-3", "mode": "max", "save_top_k": -1}
    kept = ModelCheckpoint(tmp_path, every_n_epochs=2, **options)
    model, _ = fit(4, 2, more=[kept], devices=1, enable_checkpointing=True)
    assert len(kept.best_k_models) == 2
    measured = [model.history[epoch]["accuracy_pgd-3"] for epoch in (1, 3)]
    assert sorted(map(float, kept.best_k_models.values())) == sorted(measured)
