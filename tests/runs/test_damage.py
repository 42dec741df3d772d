"""A run folder in which something was damaged, deleted or added: named, or made again."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import yopo.runs.trainer
from tests.conftest import convnet
from tests.tiny import Silent, tiny_trainer
from yopo import cli
from yopo.cli import ls
from yopo.core import seals, tensor_files
from yopo.core.files import file_digest
from yopo.core.threat import Linf
from yopo.evaluation.evaluate import evaluate
from yopo.report.records import read_runs
from yopo.report.words import notes
from yopo.runs import state
from yopo.runs.folder import BEST, LAST, has_result
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested

pytestmark = pytest.mark.usefixtures("float32")
OVER: Tree = {"epochs": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    torch.set_default_dtype(torch.float32)
    out = tmp_path_factory.mktemp("whole") / "run"
    tiny_trainer(out, OVER).run()
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same one, stopped in its third epoch."""
    torch.set_default_dtype(torch.float32)
    out = tmp_path_factory.mktemp("half") / "run"
    trainer = tiny_trainer(out, OVER)
    real = trainer._step

    def step(*args: Any) -> yopo.Step:
        trainer.stop = trainer.progress.epoch == 2
        return real(*args)

    trainer._step = step  # type: ignore[method-assign, assignment]
    with pytest.raises(StopRequested):
        trainer.run()
    assert (trainer.progress.epoch, trainer.progress.step) == (2, 1)
    return out


def read(out: Path, name: str) -> Any:
    """What a file of a run says, as the commands read it."""
    if name.endswith(".safetensors"):
        state = tensor_files.load_weights(out / name)
        return tensor_files.load_metadata(out / name) | {k: v.tolist() for k, v in state.items()}
    if name == "metrics.jsonl":
        lines, torn = seals.read_lines(out / name)
        if torn:  # told to whoever reads it
            raise ValueError(torn)
        return dict(enumerate(lines))
    return seals.read_yaml(out / name) if name == "config.yaml" else seals.read_json(out / name)


FILES = ["config.yaml", "metrics.jsonl", "result.json", BEST, LAST]


@pytest.mark.parametrize("name", FILES)
def test_one_changed_bit_is_seen_or_changes_nothing(name: str, whole: Path, tmp_path: Path) -> None:
    """Bits of blanks and of the checksum's own name may do no harm; all others are refused."""
    content, expected = (whole / name).read_bytes(), read(whole, name)
    rng, refused = random.Random(0), 0
    places = rng.sample(range(8 * len(content)), 250)
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        (tmp_path / name).write_bytes(changed)
        try:
            found = read(tmp_path, name)
        except ValueError:
            refused += 1
            continue
        if name.endswith(".safetensors"):  # the metadata's name may be another now
            found = expected | found
        for key, value in expected.items():  # a checksum's name may be another one's now
            mine = found[key]
            if name == "metrics.jsonl":
                mine = {k: mine[k] for k in value}
            assert mine == value, (place, chr(changed[place // 8]))
    assert refused > 0.9 * len(places)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_off_is_seen(name: str, whole: Path, tmp_path: Path) -> None:
    content, expected = (whole / name).read_bytes(), read(whole, name)
    for length in range(60 if name == "config.yaml" else 1, len(content) - 1, 97):
        (tmp_path / name).write_bytes(content[:length])
        try:
            found = read(tmp_path, name)
        except ValueError:
            continue
        assert name == "metrics.jsonl"
        assert found.items() <= expected.items()  # a line that was cut off is left out


def test_files_without_a_checksum_are_read(whole: Path, tmp_path: Path) -> None:
    """As earlier versions, or people, wrote them."""
    for name in ("config.yaml", "metrics.jsonl", "result.json"):
        expected = read(whole, name)
        text = (whole / name).read_text()
        if name == "config.yaml":
            text = text.partition("\n")[2]
        elif name == "result.json":
            text = json.dumps(expected)
        else:
            text = "".join(json.dumps(line) + "\n" for line in expected.values())
        assert "sha256 of" not in text
        (tmp_path / name).write_text(text)
        assert read(tmp_path, name) == expected


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_text("")


def half_a_line(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"epoch": 3, "train_sec')


def double_a_line(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines]))


def lose_the_first(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def lose_the_second(path: Path) -> None:
    first, _, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *others]))


def lose_the_last(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def double_the_last(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))


def same(out: Path, whole: Path) -> None:
    for name in FILES:
        mine, other = read(out, name), read(whole, name)
        if name == "metrics.jsonl":
            mine, other = ([timeless(v) for v in d.values()] for d in (mine, other))
        elif name == "result.json":
            mine, other = timeless(mine), timeless(other)
        assert mine == other, name


def timeless(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tree.items() if "seconds" not in k and k != "environment"}


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (BEST, flip, "model.safetensors was made again"),
        (BEST, cut, "model.safetensors was made again"),
        (BEST, delete, "model.safetensors was not there; made again"),
        ("metrics.jsonl", flip, "metrics.jsonl was damaged; made again"),
        ("metrics.jsonl", cut, "metrics.jsonl was damaged; made again"),
        ("metrics.jsonl", delete, "metrics.jsonl was damaged; made again"),
        ("metrics.jsonl", double_a_line, "metrics.jsonl was damaged; made again"),
        ("metrics.jsonl", double_the_last, None),  # as one of a later epoch, which comes again
        ("metrics.jsonl", lose_the_first, "metrics.jsonl was damaged; made again"),
        ("metrics.jsonl", lose_the_last, "metrics.jsonl was damaged; made again"),
        ("metrics.jsonl", half_a_line, None),
        ("config.yaml", flip, "config.yaml was damaged"),
        ("config.yaml", delete, "config.yaml was damaged"),
    ],
)
def test_what_was_damaged_is_made_again_on_resume(
    name: str,
    damage: Callable[[Path], None],
    said: str | None,
    half: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    damage(out / name)
    watcher = Silent()
    trainer = tiny_trainer(out, OVER, watcher)
    assert trainer.resume()
    trainer.run()
    assert [text for text in watcher.said if "made again" in text] == [
        text for text in watcher.said if said and said in text
    ]
    assert any("made again" in text for text in watcher.said) == (said is not None)
    same(out, whole)


@pytest.mark.parametrize("name", [BEST, LAST, "result.json"])
def test_a_finished_run_is_made_whole_by_resuming_it(
    name: str, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    flip(out / name)
    trainer = tiny_trainer(out, OVER)
    assert trainer.resume()
    trainer.run()
    same(out, whole)


@pytest.mark.parametrize("kind", ["a folder", "an old one"])
def test_a_run_whose_result_cannot_be_written_is_not_finished(
    kind: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old result in its place would be taken for this run's."""
    out, watcher, result = tmp_path / "run", Silent(), tmp_path / "run/result.json"
    shutil.copytree(whole, out)
    if kind == "a folder":
        result.unlink()
        result.mkdir()
    else:
        flip(result)
        real = seals.write_json

        def full(path: Path, value: Any) -> None:
            if path == result:
                raise OSError(28, "No space left on device")
            real(path, value)

        monkeypatch.setattr(seals, "write_json", full)
    trainer = tiny_trainer(out, OVER, watcher)
    assert trainer.resume()
    trainer.run()
    assert any("could not write result.json" in text for text in watcher.said)
    assert not has_result(out)


@pytest.mark.parametrize(
    "damage", [flip, cut, delete, empty, half_a_line, double_the_last, lose_the_first]
)
def test_metrics_damaged_while_a_run_trains_are_made_again(
    damage: Callable[[Path], None], whole: Path, tmp_path: Path
) -> None:
    """So that a run that ends well is one that the report reads."""
    out, watcher = tmp_path / "run", Silent()
    trainer = tiny_trainer(out, OVER, watcher)
    real = trainer._epoch

    def epoch() -> str | None:
        if trainer.progress.epoch == 2:
            damage(out / "metrics.jsonl")
        return real()

    trainer._epoch = epoch  # type: ignore[method-assign]
    trainer.run()
    same(out, whole)
    assert len(read_runs([out])[0].lines) == 3
    # One that is deleted is written with the next line.
    assert [s for s in watcher.said if "metrics" in s] == (
        [] if damage is delete else ["metrics.jsonl was damaged; made again"]
    )


def test_damage_in_the_middle_of_a_run_is_mended_at_its_end(tmp_path: Path, whole: Path) -> None:
    trainer = tiny_trainer(tmp_path / "run", OVER)
    real = trainer._finish

    def finish() -> dict[str, Any]:
        cut(tmp_path / "run" / BEST)
        (tmp_path / "run" / "config.yaml").unlink()
        return real()

    trainer._finish = finish  # type: ignore[method-assign]
    trainer.run()
    same(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"a"', "{}", '{"tensors.safetensors": []}', "["]
)
def test_a_seal_that_is_none_falls_back_to_the_checkpoint_before(
    text: str, half: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    newest = state.saved(out / "state")[0]
    (newest / "seal.json").write_text(text)
    watcher = Silent()
    trainer = tiny_trainer(out, OVER, watcher)
    assert trainer.resume()
    assert f"checkpoint {newest.name} is damaged" in watcher.said[0]
    if text == "[]":  # the others go the same way
        trainer.run()
        same(out, whole)


def test_what_else_lies_in_the_state_folder_does_no_harm(
    half: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    there = out / "state"
    shutil.copytree(state.saved(there)[0], there / "save-000001.bak")
    (there / "save-").mkdir()
    (there / "save-00000x").touch()
    (there / "save-²").touch()
    (there / "save-000900").write_text("a file")
    (there / "save-000901").mkdir()
    (there / ".writing").write_text("a file")
    odd = {path.name for path in there.iterdir() if not path.name.startswith(".")}
    watcher = Silent()
    trainer = tiny_trainer(out, OVER, watcher)
    assert trainer.resume()
    assert sum("is damaged" in text for text in watcher.said) == 2
    trainer.run()
    same(out, whole)
    assert {"save-000001.bak", "save-", "save-00000x", "save-²"} <= odd & {
        path.name for path in there.iterdir()
    }
    again = tiny_trainer(out, OVER)
    assert again.resume()
    assert again.progress.epoch == 3


def test_where_only_copies_are_damaged_the_rest_is_used(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    for path in state.saved(out / "state"):
        for name in ("good", "best"):
            if (path / f"{name}.safetensors").exists():
                flip(path / f"{name}.safetensors")
    watcher = Silent()
    trainer = tiny_trainer(out, OVER, watcher)
    assert trainer.resume()
    assert any("no checkpoint is whole; going on with what is sound" in s for s in watcher.said)
    assert (trainer.progress.epoch, trainer.progress.step) == (2, 1)
    assert any("no state that a collapse" in s for s in watcher.said)
    trainer.run()
    assert read_runs([out])[0].result is not None
    (out / BEST).unlink()
    shutil.rmtree(out / "state")
    shutil.copytree(half / "state", out / "state")
    for path in state.saved(out / "state"):
        flip(path / "best.safetensors")
    trainer = tiny_trainer(out, OVER, watcher)
    assert trainer.resume()
    assert any("the best weights so far are lost" in s for s in watcher.said)


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
def test_a_deleted_folder_ends_the_run_with_a_sentence(again: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer = tiny_trainer(out, OVER)
    real = trainer._epoch

    def epoch() -> str | None:
        if trainer.progress.epoch == 1:
            os.rename(out, tmp_path / "elsewhere")  # an inode of its own for what comes next
            if again:
                out.mkdir()
        return real()

    trainer._epoch = epoch  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="was deleted or replaced while it trained"):
        trainer.run()
    assert not out.exists() or not list(out.iterdir())


def test_the_report_reads_a_run_whose_last_line_is_cut_off(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    half_a_line(out / "metrics.jsonl")
    (run,) = read_runs([out])
    assert len(run.lines) == 2
    assert any("metrics.jsonl is cut off and was left out" in note for note in notes(run))
    flip(out / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"line \d of .*metrics.jsonl"):
        read_runs([out])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_the_first, r"line 1 of .* or it does not follow the line before it"),
        (lose_the_second, r"line 2 of .* or it does not follow"),
        (double_a_line, r"line 2 of .* or it does not follow"),
        (double_the_last, r"line 4 of .* or it does not follow"),
        (lose_the_last, r"metrics.jsonl has 2 lines, and result.json was made of 3"),
        (empty, r"metrics.jsonl has 0 lines, and result.json was made of 3"),
        (delete, r"metrics.jsonl has 0 lines, and result.json was made of 3"),
    ],
)
def test_a_line_that_is_missing_or_there_twice_is_named(
    damage: Callable[[Path], None], said: str, whole: Path, tmp_path: Path
) -> None:
    """Each line that is left is sound by itself. The report, `yopo ls` and resuming see it."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    damage(out / "metrics.jsonl")
    with pytest.raises(ValueError, match=said):
        read_runs([out])
    assert ls.row(out)[1] == "damaged"
    trainer = tiny_trainer(out, OVER)
    assert trainer.resume()
    trainer.run()
    same(out, whole)
    assert len(read_runs([out])[0].lines) == 3


@pytest.mark.parametrize("damage", [empty, delete, lose_the_last, lose_the_first])
def test_an_unfinished_run_has_the_lines_of_its_checkpoint(
    damage: Callable[[Path], None], half: Path, whole: Path, tmp_path: Path
) -> None:
    """Cut between two lines, all that is left is sound. A line more than it knows is no damage."""
    out = tmp_path / "run"
    shutil.copytree(half, out)
    assert len(read_runs([out])[0].lines) == 2
    third, last = (
        read(whole, "metrics.jsonl")[2],
        (out / "metrics.jsonl").read_text().split("\n")[1],
    )
    with (out / "metrics.jsonl").open("a") as file:  # as if it was killed after its third epoch
        file.write(seals.line(third, last) + "\n")
    assert len(read_runs([out])[0].lines) == 3
    shutil.copy(half / "metrics.jsonl", out)
    damage(out / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"not the 2 lines that the newest|does not follow"):
        read_runs([out])
    assert ls.row(out)[1] == "damaged"
    trainer = tiny_trainer(out, OVER)
    assert trainer.resume()
    trainer.run()
    same(out, whole)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"metrics": 3}', '{"metrics": [3]}', "{"])
def test_a_checkpoint_that_tells_no_lines_refuses_none(
    text: str, half: Path, tmp_path: Path
) -> None:
    """Whether it is of another version, damaged or forged: resuming says what is wrong with it."""
    out = tmp_path / "run"
    shutil.copytree(half, out)
    newest = state.saved(out / "state")[0]
    (newest / "values.json").write_text(text)
    assert len(read_runs([out])[0].lines) == 2  # its checksum does not fit
    (newest / "seal.json").write_text(
        json.dumps({"values.json": file_digest(newest / "values.json")})
    )
    assert len(read_runs([out])[0].lines) == 2
    (newest / "seal.json").write_text(text)
    assert len(read_runs([out])[0].lines) == 2


def test_metrics_of_an_earlier_version_are_gone_on_with(whole: Path, tmp_path: Path) -> None:
    """Each of its lines had a checksum by itself, or none, and the result counted none."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    result = seals.read_json(out / "result.json")
    assert result.pop("metrics")["lines"] == 3
    seals.write_json(out / "result.json", result)
    values, _ = seals.read_lines(out / "metrics.jsonl")
    alone = json.dumps({**values[1], "check": seals.json_digest(values[1])[:8]})
    texts = [json.dumps(values[0]), alone, seals.line(values[2], alone)]
    (out / "metrics.jsonl").write_text("".join(text + "\n" for text in texts))
    assert read_runs([out])[0].lines == values
    lose_the_second(out / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"line 2 of .* does not follow"):
        read_runs([out])


@pytest.mark.parametrize("name", ["config.yaml", "result.json"])
def test_the_report_names_a_damaged_file(name: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    content = (out / name).read_text()
    (out / name).write_text(content.replace("0.", "1.", 1))
    with pytest.raises(ValueError, match=f"{name} was damaged or edited") as caught:
        read_runs([out])
    assert "away" in str(caught.value)


def test_a_changed_bit_in_weights_is_not_evaluated(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    flip(out / BEST)
    with pytest.raises(ValueError, match=r"model.safetensors was damaged"):
        tensor_files.load_weights(out / BEST)
    settings = out / "config.yaml"
    settings.write_text(re.sub("(?m)^seed: .*", "seed: 99", settings.read_text()))
    monkeypatch.setattr(sys, "argv", ["yopo", "eval", str(out), "--attacks", "clean"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "config.yaml was damaged or edited" in capsys.readouterr().err


def test_a_journal_with_a_changed_bit_is_computed_again(tmp_path: Path) -> None:
    """Wherever the bit is, the evaluation ends with the same numbers."""
    torch.manual_seed(0)
    model, x = convnet(), torch.rand(24, 3, 8, 8)
    y = model(x).argmax(1)
    arguments: Any = (model, (x, y), Linf(0.05), ["pgd-2"])
    expected = evaluate(*arguments, batch=8)

    def stop(attack: str, part: float, _accuracy: float) -> None:
        if attack == "pgd-2" and part >= 0.6:
            raise KeyboardInterrupt

    rng = random.Random(0)
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            evaluate(*arguments, batch=8, state=tmp_path / "state", progress=stop)
        pieces = sorted((tmp_path / "state").rglob("pgd*.safetensors"))
        assert len(pieces) == 2
        for piece in pieces:
            content = bytearray(piece.read_bytes())
            content[-1 - rng.randrange(80)] ^= 1 << rng.randrange(8)
            piece.write_bytes(content)
        result = evaluate(*arguments, batch=8, state=tmp_path / "state")
        assert result.accuracy == expected.accuracy
        result.forget()


# ---------------------------------------------------------------- the log


@pytest.mark.parametrize("log", ["full disk", "closed pipe"])
def test_a_log_that_cannot_be_written_does_not_end_the_run(log: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    tiny = ["--epochs", "2", "--batch", "500", "--data.held_out", "5500", "--evaluate.images", "20"]
    tiny += ["--evaluate.steps", "1", "--method.name", "natural", "--model.options.width", "2"]
    command = [sys.executable, "-m", "yopo", "train", "demo", "--out", str(out), *tiny]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if log == "full disk":
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
            )
        status, words = done.returncode, done.stderr
        assert "No space left on device" in words
    else:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        words = process.stderr.read()
        process.stderr.close()
        status = process.wait()
        assert "Broken pipe" in words
    assert status == 0
    assert words.count("the log cannot be written") == 1
    assert (out / "result.json").exists()
