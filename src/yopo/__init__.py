"""Fast adversarial training for PyTorch, from the paper You Only Propagate Once (NeurIPS 2019).

>>> method = yopo.YOPO(model, yopo.Linf(eps=8 / 255), m=5, n=3)
>>> for x, y in loader:
...     out = method.backward(x, y)
...     optimizer.step()
...     optimizer.zero_grad()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yopo import attacks, models, pmp
    from yopo.core.exchange import exchange_gradients
    from yopo.core.first_layer import Cut, Split
    from yopo.core.parallel import gathered
    from yopo.core.threat import L2, Linf, Threat
    from yopo.engine.ema import EMA
    from yopo.engine.engine import Engine
    from yopo.evaluation.evaluate import evaluate
    from yopo.evaluation.result import Result
    from yopo.methods.base import AdversarialMethod, Method, Step
    from yopo.methods.fast import Fast
    from yopo.methods.free import Free
    from yopo.methods.natural import Natural
    from yopo.methods.nfgsm import NFGSM
    from yopo.methods.pgd import PGD
    from yopo.methods.pmp import PMP
    from yopo.methods.trades import TRADES
    from yopo.methods.trades_yopo import TRADESYOPO
    from yopo.methods.yopo import YOPO
    from yopo.models.normalize import Normalize
    from yopo.runs.loading import load

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "L2",
    "NFGSM",
    "PGD",
    "PMP",
    "TRADES",
    "TRADESYOPO",
    "YOPO",
    "AdversarialMethod",
    "Cut",
    "Engine",
    "Fast",
    "Free",
    "Linf",
    "Method",
    "Natural",
    "Normalize",
    "Result",
    "Split",
    "Step",
    "Threat",
    "attacks",
    "evaluate",
    "exchange_gradients",
    "gathered",
    "load",
    "models",
    "pmp",
]

# Where each name lives. It is looked up when it is first used: `yopo --help` needs no torch.
_HOMES = {
    "core.exchange": "exchange_gradients",
    "core.first_layer": "Cut Split",
    "core.parallel": "gathered",
    "core.threat": "L2 Linf Threat",
    "engine.ema": "EMA",
    "engine.engine": "Engine",
    "evaluation.evaluate": "evaluate",
    "evaluation.result": "Result",
    "methods.base": "AdversarialMethod Method Step",
    "methods.fast": "Fast",
    "methods.free": "Free",
    "methods.natural": "Natural",
    "methods.nfgsm": "NFGSM",
    "methods.pgd": "PGD",
    "methods.pmp": "PMP",
    "methods.trades": "TRADES",
    "methods.trades_yopo": "TRADESYOPO",
    "methods.yopo": "YOPO",
    "models.normalize": "Normalize",
    "runs.loading": "load",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a checker would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name in _HOME:
            value: object = getattr(import_module(f"yopo.{_HOME[name]}"), name)
        elif name in __all__:
            value = import_module(f"yopo.{name}")
        else:
            raise AttributeError(f"module 'yopo' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted([*__all__, "__version__"])
