"""Whole runs as functions: train, compare, evaluate. The command line calls these.

>>> config = configure("demo", {"epochs": 3, "method": {"name": "yopo", "m": 3, "n": 5}})
>>> train_run(config, Path("runs/first"))["best"]
>>> evaluate_run(Path("runs/first"), "pgd-20,cw", samples=1000).result.worst
>>> compare_runs(method_configs("demo", ["natural", "pgd-10"]), Path("runs/both"))

What is wrong with arguments or files is said in a ValueError, which names settings and options as
the command line does. Watchers hear of the rest, such as a disk that refuses a file.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import yopo
from yopo.core.crew import ALONE
from yopo.evaluation.network import Precision
from yopo.evaluation.result import Result
from yopo.evaluation.suite import Tell
from yopo.runs import closeup, evaluating, folder, state
from yopo.runs.alone import alone_in
from yopo.runs.build import build_data, out_of_reach, propagations, with_m
from yopo.runs.cost import Cost, cost_of
from yopo.runs.distributed import pick_device, seen_by_first, start
from yopo.runs.evaluating import Evaluation
from yopo.runs.fitting import fitted, misfits_in_a_sentence, said_of
from yopo.runs.hub import local
from yopo.runs.idle import refuse_idle
from yopo.runs.images import workers
from yopo.runs.overlay import Tree, overlay
from yopo.runs.progress import Logged, Watcher, stopped_by_signals
from yopo.runs.recipes import method_tree, recipe
from yopo.runs.saved import load_data, load_model
from yopo.runs.schedule import phases
from yopo.runs.settings import (
    Config,
    refuse_another,
    rescaled,
    validate,
    what_counts,
    with_radius,
)
from yopo.runs.tracking import Told, Track, Tracking, evaluated, trained
from yopo.runs.trainer import Trainer

# ---------------------------------------------------------------- settings


def configure(source: str | Path, *over: Tree) -> Config:
    """The settings of `source`, a recipe or a YAML file, with others over them, the last on top.

    With other epochs drops and warm-ups move along; with another radius the step does. A batch or
    a number of epochs that is given stays, whatever the recipe's `fit` says.
    """
    path = Path(source)
    is_file = path.suffix in (".yaml", ".yml")
    tree = folder.read_settings(path) if is_file else recipe(str(source))
    for given in over:
        if (epochs := _epochs(given.get("epochs"))) is not None:
            tree = rescaled(tree, epochs)
        threat = given.get("threat", {})
        if isinstance(threat, dict) and "eps" in threat and "step" not in threat:
            tree = with_radius(tree, threat)
        tree = overlay(tree, given)
        if "fit" not in given and isinstance(fit := tree.get("fit"), list):
            tree["fit"] = [name for name in fit if name not in [*given]]  # what is given stays
    return validate(tree)


def method_configs(
    source: str | Path,
    methods: Sequence[str],
    *over: Tree,
    under: Tree | None = None,
    most: float | None = None,
) -> dict[str, Config]:
    """The same settings for several methods, named as "pgd-10" or "yopo-5-3".

    source, over: as in `configure`. under: settings that the methods' own lie over. most:
    propagations per image that each may spend: as many epochs as these pay for.
    """
    configs: dict[str, Config] = {}
    base = under or {}
    for spec in methods:
        method = method_tree(spec)
        for given in (tree.get("method") for tree in over):
            if isinstance(given, Mapping) and (twice := [name for name in given if name in method]):
                raise ValueError(f"--method.{twice[0]} contradicts {spec}; write it in --methods")
        own: Tree = {"method": method}

        def lasting(epochs: Tree, own: Tree = own) -> Config:
            return configure(source, base, own | epochs, *over)

        if most is None:
            configs[spec] = lasting({})
            continue
        if any("epochs" in given for given in over):
            raise ValueError("--propagations decides the epochs; leave --epochs out")
        configs[spec] = lasting({"epochs": _affordable(lasting, spec, most)})
    return configs


def _affordable(lasting: Callable[[Tree], Config], spec: str, most: float) -> int:
    """The epochs that `most` propagations per image pay for, of a method with its settings."""
    config = lasting({})
    each = {None, *config.schedule.m}
    costs = {m: propagations(with_m(config, m)) for m in each}

    def spent(epochs: int) -> float:
        return sum(p.epochs * costs[p.m] for p in phases(lasting({"epochs": epochs})))

    if not spent(1) <= most < float("inf"):
        raise ValueError(
            f"expected --propagations of at least {spent(1):.2f}, an epoch of {spec}; got {most:g}"
        )
    cheapest = min(costs.values())
    enough = range(1, int(most / cheapest + 1e-6) + 1)
    return bisect_right(enough, most + 1e-6 * cheapest, key=spent)


def _epochs(value: object) -> int | None:
    """A number of epochs, where `validate` will take it for one: 3.0 is 3."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return int(number) if number >= 1 and number.is_integer() else None


# ---------------------------------------------------------------- training


def train_run(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    watch: Watcher | None = None,
    name: str | None = None,
    track: Track | None = None,
) -> Tree:
    """Train as `config` says in the folder `out`; return what stands in its result.

    resume: go on from the newest checkpoint there, if there is one. device: by default a GPU if
    there is one. name: what lines of the log call the run; by default its method. watch: told of
    what goes on, by those of `yopo.runs.progress.Watcher`'s methods that it has.
    track: "wandb,mlflow" and the like, or objects that are a `yopo.integrations.trackers.Tracker`;
    the first process tells them of every epoch, and in the end shows them eight images.

    In the main thread, the first Ctrl-C, SIGTERM or SIGHUP finishes the step, saves, and raises
    `yopo.runs.progress.StopRequested`. A training that collapses for good is a RuntimeError.
    """
    chosen = pick_device(device)
    start(chosen)  # what the first process sees in the folder counts
    seen_by_first(lambda: refuse_taken(out, resume=resume))
    watch = Told(watch or Logged())
    tracking = Tracking(track or (), out, out.name, config.tree(), watch.say)
    refuse_idle(config.data)
    data = build_data(config.data)
    config = fitted(config, data)
    watch.begin(config.epochs)
    trainer = Trainer(config, data, out, watch, chosen)
    if trainer.learner.rank == 0:
        watch.tracking = tracking

    def ask() -> None:
        if not trainer.stop:  # the batch of an attack may take a while
            watch.say("stopping when this batch is done; Ctrl-C again leaves at once")
        trainer.stop = True

    with alone_in(out) if trainer.learner.rank == 0 else nullcontext():
        seen_by_first(lambda: refuse_taken(out, resume=resume))  # another may have been quicker
        if resume and trainer.resume():
            p, steps = trainer.progress, len(trainer.loader)
            over = p.epoch == config.epochs
            if over:
                watch.say("all epochs are done; going on with the test")
            else:
                watch.say(f"going on from epoch {p.epoch + 1}, step {p.step}")
            if over or p.step == steps:  # an attack comes first: where the run is, is known before
                watch.step(p.epoch - over, steps, steps, "")
        elif resume:
            watch.say(f"nothing to resume in {out}; starting")
        watch.say(trainer.about())
        shared = config.model_copy(update={"batch": trainer.learner.batch})
        for line in said_of(shared, data):
            watch.say(line)
        if (weak := out_of_reach(config)) is not None:
            watch.say(f"{name or config.method.name}: {weak}")
        try:
            with stopped_by_signals(ask), misfits_in_a_sentence(config, data.pictures.shape):
                result = trainer.run()
            if watch.tracking:
                trained(watch.tracking, trainer, result)
        finally:
            tracking.end()
        return result


def compare_runs(
    configs: Mapping[str, Config],
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    watch: Callable[[str], AbstractContextManager[Watcher]] | None = None,
    track: Track | None = None,
) -> dict[str, Tree]:
    """Train each of `configs` in a folder of its name in `out`; return their results by name.

    All folders are checked before anything is trained. resume: go on with unfinished runs, and take
    the results of finished ones. watch: opened with the name of each run. device: as in
    `train_run`, and track: a run of each tracker's for each.
    """

    def check() -> None:
        for name, config in configs.items():
            path = out / name
            if resume and folder.is_finished(path):
                there = validate(folder.read_settings(path, run=True))
                mine = fitted(config, build_data(config.data)) if config.fit else config
                refuse_another(path, what_counts(there), what_counts(mine))
            else:
                refuse_taken(path, resume=resume)

    start(pick_device(device))
    seen_by_first(check)
    results: dict[str, Tree] = {}
    for name, config in configs.items():
        with watch(name) if watch else nullcontext(Logged()) as watcher:
            done = seen_by_first(lambda: _result(out / name, watcher)) if resume else None  # noqa: B023
            how: Tree = {"resume": resume, "device": device, "track": track}
            results[name] = done or train_run(config, out / name, watch=watcher, name=name, **how)
    return results


def _result(run: Path, watch: Watcher) -> Tree | None:
    """What a finished run showed; one whose result is damaged finishes again."""
    try:
        return folder.read_result(run)
    except FileNotFoundError:
        return None
    except ValueError as error:
        watch.say(f"{error}; the run finishes again")
        return None


def refuse_taken(out: Path, *, resume: bool) -> None:
    """Refuse a folder that holds a run which is not to be gone on with."""
    folder.refuse_link(out / folder.STATE)
    saved = state.saved(out / folder.STATE)
    if saved and not resume:
        raise ValueError(f"{out} holds a run; add --resume to go on, or give another --out")
    if folder.is_finished(out) and not saved:
        raise ValueError(f"{out} holds a finished run without checkpoints; give another --out")
    if (inside := folder.begun_in(out)) and not folder.is_run(out):
        raise ValueError(f"{out} holds other runs, first {inside[0].name}; give another --out")


def measure_cost(config: Config, device: str | None = None) -> Cost:
    """Measure a few steps of each phase of a training; nothing is kept."""
    refuse_idle(config.data)
    data = build_data(config.data)
    config = fitted(config, data)
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(config, data, Path(out), Logged(), pick_device(device))
        with misfits_in_a_sentence(config, data.pictures.shape):
            return cost_of(trainer, said_of(config, data))


# ---------------------------------------------------------------- evaluating


def evaluate_run(
    run: Path,
    attacks: str | Sequence[str] = ("clean", "pgd-20"),
    *,
    weights: str | None = None,
    samples: int | None = None,
    eps: float | None = None,
    step: float | None = None,
    seed: int = 0,
    batch: int = 250,
    precision: Precision = "float32",
    compile: bool = False,
    examples: bool = False,
    radii: bool = False,
    device: str | None = None,
    trust: bool = False,
    model_name: str | None = None,
    data_root: Path | None = None,
    data_path: Path | None = None,
    settings: Tree | None = None,
    progress: Tell | None = None,
    show: Callable[[Result], None] | None = None,
    track: Track | None = None,
    say: Callable[[str], None] | None = None,
    together: bool = False,
) -> Evaluation:
    """Attack the network of a run folder, or of a weights file, on its test set; write the result.

    weights: "best" (default) or "last", of a run folder. samples: test images, drawn with `seed`;
    all by default. eps: by default the run's. attacks, step, batch, precision, compile, progress:
    as in `yopo.evaluate`. device: by default a GPU if there is one. examples: write the images
    found, too, and which classes were confused. radii: a short PGD at others, too. trust,
    model_name, data_root, data_path: see `yopo.runs.saved.find`; without the first two only our
    networks and timm's are built. settings: of a network that no run made, whose weights file `run`
    is; see `yopo.runs.borrowed.borrow`. show: is given the result first. track: as in `train_run`;
    a tracker that was told of the training is told of this as the same run: the accuracies, eight
    images without and under attack, the card. say: hears of trackers that fail. together: all
    processes that torchrun started make this call, and share the work out as in `yopo.evaluate`;
    the first one shows, writes and tells trackers.

    Finished batches are kept as they come: after an interruption the same call goes on.
    """
    whose: dict[str, Any] = {"weights": weights, "eps": eps, "trust": trust, "settings": settings}
    whose |= {"model_name": model_name, "data_root": data_root, "data_path": data_path}
    saved = evaluating.check(run := local(run), attacks, **whose)
    how: Tree = {"batch": batch, "seed": seed, "precision": precision, "step": step}
    how |= {"compile": compile, "examples": examples, "progress": progress, "together": together}
    chosen = pick_device(device)
    crew = evaluating.crew_on(chosen) if together else ALONE
    with crew.all_or_none():
        place, told = folder.tracked_in(run), track if crew.rank == 0 and track else ()
        tree, say = saved.config.tree(), say or Logged().say
        tracking = Tracking(told, place, place.name, tree, say, here=not trust)
        arrays = load_data(saved)
        pictures, drawn = evaluating.choose_images(arrays.test, samples, seed)
        model = load_model(saved, arrays).to(chosen)
        written = folder.EvaluationFiles.of(run).checked()
    result = yopo.evaluate(
        model,
        pictures,
        threat := evaluating.choose_threat(saved.config, eps),
        attacks,
        state=written.state,
        about=evaluating.words(saved, model, drawn),
        workers=(readers := workers(saved.config.data)),
        **how,
    )
    result = evaluating.doubted(result, run, saved, whole=samples is None)
    if show is not None and crew.rank == 0:
        show(result)
    seen = closeup.Seen(model, pictures, arrays.names, threat, result, batch, readers, crew)
    more = closeup.look(seen, written, examples, radii)
    done = evaluating.write(written, result, run, more, crew)
    if tracking:
        evaluated(tracking, seen, saved.config.epochs)
    return done
