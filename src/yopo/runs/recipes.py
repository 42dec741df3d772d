"""Recipes: the paper's runs and our own, as plain values under which flags are laid.

On CIFAR-10 the paper sums the m weight gradients of YOPO at rate a/m with decay λ; `backward`
averages them, so the same step is rate a with decay λ/m. Departures from the paper stand in
`notes`.
"""

import difflib
from typing import NamedTuple

from yopo.methods import registry
from yopo.runs.overlay import Tree, overlay

_DECAY = 5e-4
_WARMUP = "1 epoch of learning-rate warm-up, which the paper does not have"


def method_tree(spec: str) -> Tree:
    """ "yopo-5-3" as {"name": "yopo", "m": 5, "n": 3}; also pgd-10, free-8, trades-10, fast, …

    "yopo-5-3-before" takes the weight gradients as the released code does, "yopo-5-3-last" one.
    """
    entry, given = registry.read(spec)
    return {"name": entry.name} | given


def _mnist(method: str) -> Tree:
    """Table 1: SmallCNN, eps 0.3, 55 epochs at rate 0.1, lowered at 45."""
    tree: Tree = {
        "method": method_tree(method),
        "threat": {"name": "linf", "eps": 0.3, "step": 0.01},
        "data": {"name": "mnist", "held_out": 1000},
        "model": {"name": "smallcnn", "channels_last": True},
        "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": _DECAY},
        "schedule": {"name": "piecewise", "drops": [45], "warmup": 1},
        "epochs": 55,
        "batch": 256,
        "precision": "bf16",
        "eps_warmup": 3,
        "evaluate": {"steps": 40, "every": 2, "images": 1000},
        "notes": f"{_WARMUP}. eps grows over 3 epochs, which the paper does not have. "
        "bf16 arithmetic",
    }
    return tree


def _mnist_pgd(method: str) -> Tree:
    """Fewer steps must still reach the ball's surface."""
    tree = _mnist(method)
    step = tree["threat"]["step"] = max(0.01, 0.3 / tree["method"]["steps"])
    tree["notes"] += f". Step {step:.3g}; the paper gives none for MNIST"
    return tree


def _mnist_yopo(method: str) -> Tree:
    """f0 ends after the first ReLU."""
    tree = _mnist(method)
    tree["method"] |= {"first_layer": "relu1"}
    tree["threat"]["step"] = 0.03
    tree["notes"] += ". The paper does not divide MNIST's rate by m: 0.1 on the mean gradient"
    tree["notes"] += ". Step 0.03; the paper gives none, its released code takes 0.01"
    return tree


def _cifar10(method: str, model: str) -> Tree:
    """Tables 2 and 3: eps 8/255, step 2/255."""
    tree: Tree = {
        "method": method_tree(method),
        "threat": {"name": "linf", "eps": 8 / 255, "step": 2 / 255},
        "data": {"name": "cifar10", "held_out": 1000, "crop": 4, "flip": True},
        "model": {"name": model, "channels_last": True},
        "optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": _DECAY},
        "schedule": {"name": "piecewise", "drops": [79, 90, 100], "warmup": 1},
        "epochs": 105,
        "batch": 256,
        "precision": "bf16",
        "evaluate": {"steps": 20, "every": 2, "images": 1000},
        "notes": f"{_WARMUP}. bf16 arithmetic",
    }
    if model == "preactresnet18":
        tree["model"]["options"] = {"final_bn": False}
    return tree


def _cifar10_yopo(method: str, model: str) -> Tree:
    """40 epochs at rate 0.2 on the mean gradient."""
    tree = _cifar10(method, model)
    tree["schedule"]["drops"] = [30, 36]
    tree["optimizer"] |= {"lr": 0.2, "weight_decay": _DECAY / tree["method"]["m"]}
    if model == "preactresnet18":
        tree["notes"] += ". Without the warm-up, YOPO-5-3 went to NaN within 22 steps"
    return tree | {"epochs": 40}


def _cifar10_free(method: str, model: str) -> Tree:
    """12 epochs, each of which goes m times through every batch."""
    tree = _cifar10(method, model)
    tree["schedule"]["drops"] = [9, 11]
    tree["notes"] += ". The paper gives no schedule for Free; 12 epochs of 8 replays"
    return tree | {"epochs": 12}


def _trades(method: str) -> Tree:
    """Table 4: λ = 1, 105 epochs at rate 0.2, lowered at 70, 90 and 100."""
    over: Tree = {
        "method": method_tree(method) | {"beta": 1.0},
        "optimizer": {"lr": 0.2, "weight_decay": _DECAY},
        "schedule": {"drops": [70, 90, 100]},
        "epochs": 105,
    }
    return overlay(_cifar10(method, "preactresnet18"), over)


DEMO: Tree = {
    "method": method_tree("yopo-3-5"),
    "threat": {"name": "linf", "eps": 0.3, "step": 0.3 / 8},
    "data": {"name": "mnist-subset", "held_out": 1000},
    "model": {"name": "smallcnn", "channels_last": True, "options": {"width": 16, "hidden": 100}},
    "optimizer": {"name": "adamw", "lr": 4e-3, "weight_decay": _DECAY},
    "schedule": {"name": "onecycle", "warmup": 2},
    "epochs": 7,
    "batch": 100,
    "eps_warmup": 2,
    "evaluate": {"steps": 20, "images": 200, "keep": "last"},
}

OWN: Tree = {
    "method": method_tree("yopo-3-3"),
    "threat": {"name": "linf", "eps": 8 / 255, "step": 2 / 255},
    "data": {"name": "folder", "size": 64, "held_out": 0.1, "crop": 4, "flip": True},
    "model": {"name": "fitted", "normalize": True},
    "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": _DECAY},
    "schedule": {"name": "onecycle", "warmup": 9},
    "epochs": 30,
    "batch": 128,
    "fit": ["batch", "epochs"],
    "eps_warmup": 6,
    "evaluate": {"keep": "last"},  # few held-out images choose by chance
}

_UNTRIED = "Not trained on ImageNet by us: no accuracy is promised"
IMAGENET: Tree = {
    "method": method_tree("yopo-3-2") | {"grad_at": "last"},  # an ending is looked up with torch
    "threat": {"name": "linf", "eps": 4 / 255, "step": 2 / 255},
    "data": {
        "name": "folder",
        "size": 224,
        "held_out": 0.01,
        "area": 0.25,
        "flip": True,
        "resident": False,
    },
    "model": {"name": "resnet50", "normalize": "imagenet", "channels_last": True},
    "optimizer": {"lr": 0.2, "nesterov": True, "weight_decay": 1e-4},
    "schedule": {
        "name": "onecycle",
        "warmup": 2,
        "phases": [6, 12],
        "sizes": [128, 192],
        "m": [1, 2],
    },
    "epochs": 15,
    "batch": 512,
    "eps_warmup": 3,
    "ema": 0.999,
    "precision": "bf16",
    "evaluate": {"steps": 10, "images": 1000, "keep": "last"},
    "notes": f"{_UNTRIED}. In the spirit of Fast is better than free (arXiv:2001.03994): "
    "15 epochs, in which pictures grow after 6 and 12. There the adversary takes one step of 5/255 "
    "throughout; here it takes m of 4/255 (conv1 is affine), and m grows with the pictures. The "
    "rate is the usual one of ResNet-50, 0.1 for 256 images. BatchNorm's running statistics are of "
    "the pictures trained on last, so the last phase has the size that is tested",
}
FINETUNE: Tree = {
    "method": method_tree("fast"),
    "model": {"name": "timm:resnet50", "start": "timm"},
    "optimizer": {"lr": 0.01},
    "schedule": {"warmup": 1, "phases": [], "sizes": [], "m": []},
    "epochs": 5,
    "batch": 256,
    "eps_warmup": 2,
    "notes": f"{_UNTRIED}. In the spirit of arXiv:2506.22602, where fine-tuning with single steps "
    "lost 0.4 points of robust accuracy at eps 4/255 (1.4 at 8/255) against PGD, on average over "
    "its data sets, at a quarter of the time, and of arXiv:2509.23325, where eps grows at first. "
    "Rate and epochs are ours. timm's weights are fetched when training begins; without a network "
    "--model.start FILE.safetensors. Another network of timm's may want another "
    "--model.normalize, which a line then says. With other classes than ImageNet's 1,000 the head "
    "is new",
}

RECIPES: dict[str, tuple[str, Tree]] = {
    "demo": ("embedded digits, a small network, YOPO-3-5: about a minute on a CPU", DEMO),
    "own": ("your own pictures (--data.root DIR) at eps 8/255, with a network that fits them", OWN),
    "mnist-fast": (
        "MNIST at eps 0.3, quickly: YOPO-5-10 with a one-cycle rate",
        overlay(
            _mnist_yopo("yopo-5-10"),
            {
                "epochs": 30,
                "schedule": {"name": "onecycle", "warmup": 3, "drops": []},
                "ema": 0.998,
                "evaluate": {"keep": "last"},
                "notes": "",
            },
        ),
    ),
    "cifar10-fast": (
        "CIFAR-10 at eps 8/255, quickly: YOPO-3-3 at 10/255, one-cycle rate, averaged weights",
        overlay(
            _cifar10_yopo("yopo-3-3", "preactresnet18"),
            {
                "epochs": 33,
                "train_eps": 1.25,  # gives clean accuracy away for robust
                "label_smoothing": 0.2,
                "schedule": {"name": "onecycle", "warmup": 10, "drops": []},
                "optimizer": {"nesterov": True, "weight_decay": _DECAY},
                "model": {"options": {"final_bn": True}},
                "ema": 0.999,
                "evaluate": {"keep": "last"},
                "notes": "",
            },
        ),
    ),
    "imagenet-fast": (
        "ImageNet's folders (--data.root DIR) at eps 4/255 from nothing, with pictures, eps and m "
        "that grow",
        IMAGENET,
    ),
    "imagenet-finetune": (
        "a network of timm's with its weights, on such folders at eps 4/255, in single steps",
        overlay(IMAGENET, FINETUNE),
    ),
}
_MNIST = {_mnist_pgd: ["pgd-5", "pgd-10", "pgd-40"], _mnist_yopo: ["yopo-5-10"]}
for _like, _m in ((like, m) for like, rows in _MNIST.items() for m in rows):
    RECIPES[f"mnist-{_m}"] = (f"the paper's table 1: {_m}, SmallCNN on MNIST", _like(_m))
_CIFAR10 = {_cifar10: ["pgd-3", "pgd-5", "pgd-10"], _cifar10_yopo: ["yopo-3-5", "yopo-5-3"]}
for _of, _m in ((of, m) for of, rows in _CIFAR10.items() for m in rows):
    RECIPES[f"cifar10-{_m}"] = (
        f"the paper's table 2: {_m}, PreAct-ResNet18 on CIFAR-10",
        _of(_m, "preactresnet18"),
    )
RECIPES["cifar10-free-8"] = (
    "not in the paper: free-8 beside its table 2, PreAct-ResNet18 on CIFAR-10",
    _cifar10_free("free-8", "preactresnet18"),
)
_WIDE = {
    _cifar10: ["natural", "pgd-3", "pgd-5", "pgd-10"],
    _cifar10_free: ["free-8"],
    _cifar10_yopo: ["yopo-3-5", "yopo-5-3"],
}
for _of, _m in ((of, m) for of, rows in _WIDE.items() for m in rows):
    RECIPES[f"cifar10-wrn-{_m}"] = (
        f"the paper's table 3: {_m}, WRN-34-10 on CIFAR-10",
        _of(_m, "wideresnet"),
    )
for _m in ("trades-10", "trades-yopo-3-4", "trades-yopo-2-5"):
    RECIPES[f"cifar10-{_m}"] = (
        f"the paper's table 4: {_m}, PreAct-ResNet18 on CIFAR-10",
        _trades(_m),
    )


class Reached(NamedTuple):
    """What a recipe took and reached, in % of the test images; the mean over seeds.

    `where` names runs in records/, or a table's row. AutoAttack was made on one seed.
    """

    seconds: float | None  # of training, on one H200; where two epochs were run, times their number
    clean: float | None
    pgd_cw: float | None  # in the worst case over PGD and CW
    autoattack: float | None
    where: str
    few: tuple[str, ...] = ()  # of these, what was measured on 1,000 test images or fewer


_AA = ("autoattack",)
REACHED = {
    "demo": Reached(None, 96.8, 81.5, None, "demo-seeds-cpu/seed-0/yopo-3-5", ("clean", "pgd_cw")),
    "mnist-fast": Reached(
        18, 99.4, 95.5, 92.9, "mnist-h200/fast/seed-0, mnist-h200/fast/autoattack-1000", _AA
    ),
    "cifar10-fast": Reached(83, 79.2, None, 48.8, "cifar10-fast-h200/33-epochs"),
    "mnist-pgd-5": Reached(22, 99.5, 95.9, 93.5, "reproduction/table1 PGD-5", _AA),
    "mnist-pgd-10": Reached(37, 99.5, 95.8, 92.8, "reproduction/table1 PGD-10", _AA),
    "mnist-pgd-40": Reached(124, 99.5, 96.0, 94.2, "reproduction/table1 PGD-40"),
    "mnist-yopo-5-10": Reached(32, 99.5, 96.3, 93.9, "reproduction/table1 YOPO-5-10"),
    "cifar10-pgd-3": Reached(186, 88.1, 36.4, 34.5, "reproduction/table2 PGD-3", _AA),
    "cifar10-pgd-5": Reached(262, 85.7, 41.7, 39.8, "reproduction/table2 PGD-5", _AA),
    "cifar10-pgd-10": Reached(446, 84.5, 44.7, 43.6, "reproduction/table2 PGD-10"),
    "cifar10-yopo-3-5": Reached(101, 82.1, 45.5, 44.3, "reproduction/table2 YOPO-3-5", _AA),
    "cifar10-yopo-5-3": Reached(141, 82.4, 45.2, 43.0, "reproduction/table2 YOPO-5-3", _AA),
    "cifar10-free-8": Reached(66, 76.6, 42.6, 41.1, "reproduction/table2 Free-8", _AA),
    "cifar10-wrn-natural": Reached(522, None, None, None, "reproduction/table3 Natural"),
    "cifar10-wrn-pgd-3": Reached(1457, None, None, None, "reproduction/table3 PGD-3"),
    "cifar10-wrn-pgd-5": Reached(2088, None, None, None, "reproduction/table3 PGD-5"),
    "cifar10-wrn-pgd-10": Reached(3635, None, None, None, "reproduction/table3 PGD-10"),
    "cifar10-wrn-free-8": Reached(468, None, None, None, "reproduction/table3 Free-8"),
    "cifar10-wrn-yopo-3-5": Reached(722, None, None, None, "reproduction/table3 YOPO-3-5"),
    "cifar10-wrn-yopo-5-3": Reached(1076, 86.3, None, None, "reproduction/table3 YOPO-5-3"),
    "cifar10-trades-10": Reached(529, 87.4, 44.1, 42.9, "reproduction/table4 TRADES-10"),
    "cifar10-trades-yopo-3-4": Reached(
        279, 87.3, 43.7, None, "reproduction/table4 TRADES-YOPO-3-4"
    ),
    "cifar10-trades-yopo-2-5": Reached(
        248, 87.8, 42.6, 39.8, "reproduction/table4 TRADES-YOPO-2-5", _AA
    ),
}


def recipe(name: str) -> Tree:
    """The values of a recipe."""
    if name in RECIPES:
        return RECIPES[name][1]
    near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"no recipe {name!r}; {hint}`yopo recipes` lists them, and settings come after the recipe"
    )
