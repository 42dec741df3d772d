"""Fast adversarial training for PyTorch, from the paper You Only Propagate Once (NeurIPS 2019).

>>> method = yopo.YOPO(model, yopo.Linf(eps=8 / 255), m=5, n=3)
>>> for x, y in loader:
...     out = method.backward(x, y)
...     optimizer.step()
...     optimizer.zero_grad()
"""

from yopo import attacks, models
from yopo.ema import EMA
from yopo.engine import Engine
from yopo.evaluation.evaluate import evaluate
from yopo.evaluation.result import Result
from yopo.exchange import exchange_gradients
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
from yopo.split import Cut, Split
from yopo.threat import L2, Linf, Threat

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
    "models",
]
