"""Runs on the Hugging Face Hub: one is published there, and others' are read as folders here."""

import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yopo.core import files, seals, tensor_files
from yopo.data.sources import default_root
from yopo.evaluation.model_card import Published, model_card
from yopo.runs.accuracies import accuracies
from yopo.runs.folder import BEST, CONFIG, EVALUATION, refuse_link
from yopo.runs.saved import Saved, find, load_images
from yopo.runs.settings import Config
from yopo.runs.starting import TIMM

HF = "hf:"
CARD = "README.md"  # as the Hub shows it
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,200}", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
LARGEST = 20 << 30  # bytes of weights that are fetched


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where a run is to be seen now."""

    address: str  # of the commit
    files: tuple[str, ...]
    card: str


# ---------------------------------------------------------------- to the Hub


def push_run(
    run: Path,
    repo: str,
    *,
    weights: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    unevaluated: bool = False,
    trust: bool = False,
    model_name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Pushed:
    """Publish the network of a run folder or a weights file as `repo`, "ORG/NAME", in one commit.

    Weights, settings, evaluation and model card; where data lie on this computer is left out. The
    newest evaluation of just these weights goes along; without one nothing is published, unless
    `unevaluated` says so. revision: a branch. private: a repository that is made is not for all to
    see. say: hears what is sent. weights, trust, model_name: see `yopo.runs.saved.find`. Who you
    are, the Hub knows from `hf auth login` or $HF_TOKEN.
    """
    _check(repo, revision)
    hub = _package()
    saved = find(run, weights, trust=trust, model_name=model_name)
    known = accuracies(run, saved)
    evaluation = known.evaluation if known else None
    if evaluation is None and not unevaluated:
        raise ValueError(
            f"{run} has no evaluation of {saved.weights.name} as it is now; run `yopo eval {run}` "
            "first, or say --unevaluated, and the card says so"
        )
    card = model_card(_words(repo, saved, evaluation, known.accuracy if known else None))
    with tempfile.TemporaryDirectory(prefix="yopo-") as name:
        folder = Path(name)
        _write(folder, saved, evaluation)
        files.write_text(folder / CARD, card)
        there = sorted(path.name for path in folder.iterdir())
        say(f"sending {', '.join(there)} to {repo}")
        with _answered(f"{repo} was not published"):
            api = hub.HfApi(library_name="yopo-torch")
            api.create_repo(repo, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            done = api.create_commit(
                repo,
                [hub.CommitOperationAdd(name, folder / name) for name in there],
                commit_message=f"{saved.config.model.name}, trained with "
                f"{saved.config.method.name}",
                revision=revision,
            )
    return Pushed(str(done.commit_url), tuple(there), card)


def _words(
    repo: str, saved: Saved, evaluation: dict[str, Any] | None, own: dict[str, float] | None
) -> Published:
    config, images = saved.config, load_images(saved)
    return Published(
        repo=repo,
        model=config.model.name,
        method=config.method.name,
        data=config.data.name,
        threat=config.threat.name,
        eps=config.threat.eps,
        classes=tuple(images.names),
        shape=tuple(images.test.shape),
        evaluation=evaluation and _of(evaluation, BEST),
        own=own,
    )


def _write(folder: Path, saved: Saved, evaluation: dict[str, Any] | None) -> None:
    """A run's folder, as it is published: whatever the weights were called, they are the best."""
    tree = _public(saved.config).tree()
    seals.write_yaml(folder / CONFIG, tree)
    words = tensor_files.load_metadata(saved.weights)
    state = tensor_files.load_weights(saved.weights)
    images = load_images(saved)
    words["config"] = json.dumps(tree)
    words["images"] = json.dumps({"classes": images.names, "shape": images.test.shape})
    tensor_files.save_weights(folder / BEST, state, words)
    if evaluation is not None:
        values = _of(evaluation, BEST)
        values["about"]["file_sha256"] = files.file_digest(folder / BEST)
        seals.write_json(folder / EVALUATION, values)


def _of(evaluation: dict[str, Any], weights: str) -> dict[str, Any]:
    """The same evaluation, of weights under another name."""
    return {**evaluation, "about": {**evaluation["about"], "weights": weights}}


def _public(config: Config) -> Config:
    """Without where data and first weights lie on this computer."""
    nowhere: dict[str, Any] = {"root": None, "path": None, "options": {}}
    data, model = config.data.model_copy(update=nowhere), config.model
    if model.start != TIMM:
        model = model.model_copy(update={"start": None})
    return config.model_copy(update={"data": data, "model": model})


# ---------------------------------------------------------------- from the Hub


def local(run: str | Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """A folder of this computer: `run` itself, or for hf:ORG/NAME[@REVISION] what was fetched.

    Settings and weights are fetched, once for each commit, and nothing else: evaluations made here
    lie beside them, and those of others are on the network's page.
    """
    name = str(run)
    if not name.startswith(HF):
        return Path(run)
    repo, at, revision = name.removeprefix(HF).partition("@")
    _check(repo, revision if at else None)
    hub = _package()
    with _answered(f"{name} was not read"):
        api = hub.HfApi(library_name="yopo-torch")
        about = api.model_info(repo, revision=revision or None, files_metadata=True)
    sizes = {file.rfilename: file.size for file in about.siblings or []}
    if lacking := [file for file in (CONFIG, BEST) if file not in sizes]:
        raise ValueError(
            f"{name} has no {' and no '.join(lacking)}; expected what `yopo push` made"
        )
    for file, most in ((CONFIG, files.SETTINGS), (BEST, LARGEST)):
        if (size := sizes[file]) is None or not 0 <= size <= most:
            many = "an unknown number of" if size is None else f"{size:,}"
            raise ValueError(f"{file} of {name} has {many} bytes, expected up to {most:,}")
    if not COMMIT.fullmatch(str(about.sha)):
        raise ValueError(f"expected a commit of {name}, got {str(about.sha)[:60]!r}")
    folder = default_root() / "hub" / repo.replace("/", "--") / str(about.sha)
    refuse_link(folder)
    for file in (CONFIG, BEST):
        if not (folder / file).is_file():
            say(f"fetching {file} of {name} ({sizes[file] / 1e6:.1f} MB)")
            with _answered(f"{file} of {name} was not fetched"):
                api.hf_hub_download(repo, file, revision=about.sha, local_dir=folder)
    return folder


def _check(repo: str, revision: str | None) -> None:
    if not REPO.fullmatch(repo):
        raise ValueError(f"expected a repository of the Hub, as ORG/NAME, got {repo[:60]!r}")
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ValueError(f"expected a branch, a tag or a commit, got {revision[:60]!r}")


def _package() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ValueError("the Hub needs huggingface_hub: pip install 'yopo-torch[hub]'") from None


@contextmanager
def _answered(what: str) -> Iterator[None]:
    """What the Hub, its package or the network between makes of it, as one line."""
    try:
        yield
    except Exception as error:
        why = error.__cause__ or error  # where a file could not be sent, the package hides it
        said = " ".join(str(why).split())[:300] or type(why).__name__
        raise ValueError(f"{what}: {said}") from None
