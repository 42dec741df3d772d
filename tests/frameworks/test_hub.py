"""Publishing on the Hub and reading from it, through huggingface_hub and a server beside us."""

import base64
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import yaml

import yopo
from tests.cli.test_commands import yopo as command
from tests.published import CLASSES, write_evaluation, write_network
from yopo.core import files, seals, tensor_files
from yopo.runs.hub import local, push_run

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs yopo-torch[hub]")
constants = importlib.import_module("huggingface_hub.constants")
# huggingface_hub's own, of httpx
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_made_up_for_a_test"
REPO = "someone/robust-net"


class Hub:
    """The parts of the Hub that are used: repositories with branches, each a commit of files."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}  # its visibility, its branches
        self.commits: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}  # large files, by their digest
        self.said: list[str] = []  # requests
        self.hides_sizes = False
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                content = self.content()
                hub.said.append(f"{self.command} {self.path}")
                hub.tokens.add(self.headers.get("Authorization"))
                status, headers, body = hub.answer(self.command, self.path, content)
                self.send_response(status)
                sent = body if isinstance(body, bytes) else json.dumps(body).encode()
                for name, value in ({"Content-Length": str(len(sent))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(sent)

            def content(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()

    def put(self, repo: str, branch: str, there: dict[str, bytes]) -> str:
        listed = sorted((name, hashlib.sha1(c).hexdigest()) for name, c in there.items())
        commit = hashlib.sha1(repr(listed).encode()).hexdigest()
        self.commits[commit] = there
        self.repos.setdefault(repo, {"main": ""})[branch] = commit
        return commit

    def of(self, repo: str, revision: str) -> str:
        return str(self.repos[repo].get(revision, revision))

    def answer(self, verb: str, path: str, content: bytes) -> tuple[int, dict[str, str], Any]:
        path, _, query = path.partition("?")
        if path == "/api/repos/create":
            asked = json.loads(content)
            repo = f"{asked['organization']}/{asked['name']}"
            new = repo not in self.repos
            if new:
                self.repos[repo] = {"visibility": asked.get("visibility")}
                self.put(repo, "main", {})
            return 200 if new else 409, {}, {"url": f"{self.address}/{repo}"}
        if path == "/api/validate-yaml":
            return 200, {}, {"errors": [], "warnings": []}
        if path.startswith("/objects/"):
            self.objects[path.removeprefix("/objects/")] = content
            return 200, {}, {}
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(content)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.address}/objects/{one['oid']}"}}
            return 200, {}, {"transfer": "basic", "objects": objects}
        if match := re.fullmatch(r"/api/models/(.+?/.+?)/(\w+)/(.+)", path):
            return self.of_a_model(match[1], match[2], match[3], content, query)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self.of_a_model(match[1], "revision", "main", content, query)
        if match := re.fullmatch(r"/(.+?/.+?)/resolve/(.+?)/(.+)", path):
            commit = self.of(match[1], match[2])
            got = self.commits[commit].get(match[3])
            if got is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, {}
            tag = f'"{hashlib.sha256(got).hexdigest()}"'
            return 200, {"ETag": tag, "X-Repo-Commit": commit}, got
        return 404, {}, {"error": f"{verb} {path} is not spoken here"}

    def of_a_model(
        self, repo: str, what: str, revision: str, content: bytes, query: str
    ) -> tuple[int, dict[str, str], Any]:
        revision = unquote(revision)
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
        if what == "branch":
            self.repos[repo].setdefault(revision, self.repos[repo]["main"])
            return 201, {}, {}
        if what == "preupload":
            asked = json.loads(content)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in asked
            ]
            return 200, {}, {"files": modes}
        if what == "commit":
            there = dict(self.commits[self.of(repo, revision)])
            for line in map(json.loads, content.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    there[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    there[value["path"]] = self.objects[value["oid"]]
            commit = self.put(repo, revision, there)
            address = f"{self.address}/{repo}/commit/{commit}"
            return 200, {}, {"success": True, "commitOid": commit, "commitUrl": address}
        assert what == "revision"
        commit = self.of(repo, revision)
        if commit not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, {"error": "no such revision"}
        sizes = {name: len(c) for name, c in self.commits[commit].items()} if query else {}
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        for file in siblings if self.hides_sizes else ():
            del file["size"]
        return 200, {}, {"id": repo, "sha": commit, "siblings": siblings}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    there = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", there.address)
    template = there.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name, value in {
        "HF_ENDPOINT": there.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "YOPO_DATA": str(tmp_path / "cache"),
        "no_proxy": "*",
    }.items():
        monkeypatch.setenv(name, value)
    yield there
    there.server.shutdown()
    there.server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was trained on data whose place is this computer's own affair."""
    folder = tmp_path / "run"
    data = {"name": "npz", "path": str(tmp_path / "secret" / "faces.npz")}
    net = write_network(folder, "preactresnet18", data=data)
    write_evaluation(folder, net)
    return folder


def test_a_published_run_is_loaded_from_the_hub(run: Path, hub: Hub, tmp_path: Path) -> None:
    done = push_run(run, REPO, private=True)
    assert done.files == ("README.md", "config.yaml", "eval.json", "model.safetensors")
    commit = hub.repos[REPO]["main"]
    assert done.address == f"{hub.address}/{REPO}/commit/{commit}"
    assert hub.repos[REPO]["visibility"] == "private"
    assert hub.tokens == {f"Bearer {TOKEN}", None}  # None: the large file has its own address
    x = torch.rand(2, 3, 32, 32)
    net = yopo.load(f"hf:{REPO}")
    assert net(x).equal(yopo.load(run)(x))
    assert net.class_names == CLASSES
    assert net.image_shape == (3, 32, 32)
    before = len(hub.said)
    assert yopo.load(f"hf:{REPO}@{commit}")(x).equal(net(x))
    assert len(hub.said) == before + 1  # which files there are; they are here already


def test_where_data_lie_stays_here(run: Path, hub: Hub, tmp_path: Path) -> None:
    push_run(run, REPO)
    for name, content in hub.commits[hub.repos[REPO]["main"]].items():
        assert str(tmp_path).encode() not in content, name
        assert b"faces" not in content, name
    assert b"faces" in (run / "config.yaml").read_bytes()


def test_what_is_published_is_a_run_with_its_evaluation(
    run: Path, hub: Hub, tmp_path: Path
) -> None:
    """As whoever downloads the whole repository has it."""
    push_run(run, REPO)
    folder = tmp_path / "clone"
    folder.mkdir()
    for name, content in hub.commits[hub.repos[REPO]["main"]].items():
        (folder / name).write_bytes(content)
    values, mine = (seals.read_json(at / "eval.json") for at in (folder, run))
    assert values["attacks"] == mine["attacks"]
    assert values["about"]["file_sha256"] == files.file_digest(folder / "model.safetensors")
    there, here = (tensor_files.load_weights(at / "model.safetensors") for at in (folder, run))
    assert there.keys() == here.keys()
    assert all(there[key].equal(here[key]) for key in here)
    assert push_run(folder, "someone/again").card.splitlines()[10:] != []  # it counts as evaluated


def test_the_card_is_one_that_the_hub_reads(run: Path, hub: Hub) -> None:
    """By huggingface_hub's own reader: one metric an attack, with its settings."""
    card = huggingface_hub.ModelCard(push_run(run, REPO).card)
    assert card.data.library_name == "yopo-torch"
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.tags == ["adversarial-training", "adversarial-robustness", "linf", "yopo"]
    assert card.data.model_name == "robust-net"
    values = seals.read_json(run / "eval.json")
    read = {result.metric_name: result for result in card.data.eval_results}
    assert {name: r.metric_value for name, r in read.items()} == {
        "accuracy": values["attacks"]["clean"]["accuracy"],
        "robust accuracy under pgd-20": values["attacks"]["pgd-20"]["accuracy"],
        "robust accuracy under autoattack": values["attacks"]["autoattack"]["accuracy"],
        "robust accuracy, worst case of each image": values["worst"]["accuracy"],
    }
    attack = read["robust accuracy under autoattack"]
    assert attack.metric_args == {
        "interval_95": values["attacks"]["autoattack"]["interval"],
        "threat": "L∞, eps = 8/255",
        "eps": 8 / 255,
        "settings": "standard version",
    }
    assert (attack.dataset_name, attack.dataset_split) == ("npz", "test")
    assert attack.dataset_args == {"images": 10_000}
    assert f'yopo.load("hf:{REPO}")' in card.text
    assert "| autoattack | 43.75% (42.8–44.8) | standard version |" in card.text


def test_the_card_says_at_which_radius_each_number_was_found(run: Path, hub: Hub) -> None:
    """Which may not be that of the training."""
    values = seals.read_json(run / "eval.json")
    values["about"] |= {"eps": 1 / 255, "threat": "L∞, eps = 1/255"}
    seals.write_json(run / "eval.json", values)
    text = push_run(run, REPO).card
    attacked = huggingface_hub.ModelCard(text).data.eval_results[1:]
    assert [r.metric_args["eps"] for r in attacked] == [1 / 255] * 3
    assert "to hold under attacks in an L∞ ball of radius 8/255." in text
    assert "Threat: L∞, eps = 1/255." in text


def test_data_sets_of_the_hub_have_its_names(hub: Hub, tmp_path: Path) -> None:
    net = write_network(tmp_path / "c10", "preactresnet18", data={"name": "cifar10"})
    write_evaluation(tmp_path / "c10", net)
    card = huggingface_hub.ModelCard(push_run(tmp_path / "c10", REPO).card)
    assert card.data.datasets == ["uoft-cs/cifar10"]
    assert {r.dataset_type for r in card.data.eval_results} == {"uoft-cs/cifar10"}


def test_weights_that_no_evaluation_saw_are_published_only_on_demand(run: Path, hub: Hub) -> None:
    state = tensor_files.load_weights(run / "model.safetensors")
    state["net.linear.bias"] += 1
    words = tensor_files.load_metadata(run / "model.safetensors")
    tensor_files.save_weights(run / "model.safetensors", state, words)
    with pytest.raises(ValueError, match=r"no evaluation of model.safetensors as it is now; run"):
        push_run(run, REPO)
    assert not hub.said
    done = push_run(run, REPO, unevaluated=True)
    assert "eval.json" not in done.files
    assert "No evaluation of these weights is published with them." in done.card
    assert "model-index" not in yaml.safe_load(done.card.split("---")[1])


def test_names_from_files_do_not_steer_the_card(run: Path, hub: Hub) -> None:
    values = seals.read_json(run / "eval.json")
    evil = "x\n---\nlicense: mit\n<script>alert(1)</script> [here](http://127.0.0.1:9)"
    values["about"]["data"] = values["about"]["hardware"] = evil
    values["attacks"][evil] = values["attacks"].pop("pgd-20")
    seals.write_json(run / "eval.json", values)
    card = push_run(run, REPO).card
    assert "license" not in yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    body = card.partition("\n---\n")[2]
    assert "<script>" not in body.replace("\\<script\\>", "")
    assert "[here]" not in body


def test_a_branch_is_published_beside_the_rest(run: Path, hub: Hub) -> None:
    push_run(run, REPO, revision="trial/1")
    assert not hub.commits[hub.repos[REPO]["main"]]
    assert local(f"hf:{REPO}@trial/1").name == hub.repos[REPO]["trial/1"]
    with pytest.raises(ValueError, match=r"has no config.yaml and no model.safetensors; expected"):
        local(f"hf:{REPO}")


def test_the_commands_take_what_is_on_the_hub(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    push_run(run, REPO)
    write_network(run.parent / "digits", "smallcnn")
    push_run(run.parent / "digits", "someone/digits", unevaluated=True)
    words = ("eval", "hf:someone/digits", "--attacks", "clean", "--samples", "20")
    assert command(monkeypatch, *words, "--device", "cpu") == 0
    out = capsys.readouterr().out
    card = Path(out.split("card: ")[1].strip().replace("\n", ""))
    assert card == local("hf:someone/digits") / "eval.md"
    picture = Path(yopo.__file__).parents[2] / "docs" / "tutorials" / "none.png"
    assert command(monkeypatch, "predict", f"hf:{REPO}", picture) == 2
    assert "none.png" in capsys.readouterr().err
    assert command(monkeypatch, "export", f"hf:{REPO}", "--to", "pt2", "--out", run / "x.pt2") == 0


def test_the_installed_command_publishes(run: Path, hub: Hub) -> None:
    """With nothing of the package changed: the address and the token are in the environment."""
    code = (
        "from yopo.__main__ import main; main(); import yopo; "
        f"print(yopo.load('hf:{REPO}').class_names[:3])"
    )
    words = [sys.executable, "-c", code, "push", str(run), REPO]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.splitlines() == [
        f"sending README.md, config.yaml, eval.json, model.safetensors to {REPO}",
        f"published: {hub.address}/{REPO}/commit/{hub.repos[REPO]['main']}",
        "('cat', 'dog', 'owl')",
    ]
    assert f"Bearer {TOKEN}" in hub.tokens


def test_what_the_hub_refuses_is_one_sentence(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"^hf:{REPO} was not read: .*404"):
        local(f"hf:{REPO}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    with pytest.raises(ValueError, match=f"^{REPO} was not published: "):
        push_run(run, REPO)


@pytest.mark.parametrize(
    "name",
    ["someone", "../x/y", "a/..", "a/b/c", "a/b@../../x", "a/b@", "a/b@-x", "//host/x", "a b/c"],
)
def test_names_that_are_no_repository_are_refused_unasked(name: str, hub: Hub) -> None:
    with pytest.raises(ValueError, match="expected a "):
        local(f"hf:{name}")
    assert not hub.said


def test_a_strangers_repository_follows_the_rule_of_trust(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is judged as any run folder is, and nothing in it but settings and weights is fetched."""
    push_run(run, REPO)
    there = dict(hub.commits[hub.repos[REPO]["main"]])
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = yaml.safe_load(there["config.yaml"])
    settings["model"] = {"name": "evil:build"}
    evil = {"config.yaml": yaml.safe_dump(settings).encode(), "__init__.py": b"1", "../x": b"1"}
    hub.put(REPO, "main", there | evil)
    with pytest.raises(ValueError, match="names evil:build, which was not built"):
        yopo.load(f"hf:{REPO}")
    hub.put(REPO, "main", there | {"model.safetensors": b"\x80\x04cposix\nsystem\n."})
    with pytest.raises(ValueError, match="is a pickle, which can run code"):
        yopo.load(f"hf:{REPO}")
    hub.put(REPO, "main", there | {"config.yaml": b"x: " + bytes(70_000)})
    with pytest.raises(
        ValueError, match=r"config.yaml of .* has 70,003 bytes, expected up to 65,536"
    ):
        yopo.load(f"hf:{REPO}")
    hub.put(REPO, "main", there)
    hub.hides_sizes = True
    with pytest.raises(ValueError, match=r"config.yaml of .* has an unknown number of bytes"):
        yopo.load(f"hf:{REPO}")
    assert not (tmp_path / "ran").exists()
    folders = [*(tmp_path / "cache" / "hub").glob("*/*")]
    assert len(folders) == 2
    for folder in folders:
        assert {f.name for f in folder.iterdir()} == {".cache", "config.yaml", "model.safetensors"}
