"""The report in headless Chromium: drawn, toggled, walked by keys, and on its own.

The page lies in a frame of a phone's or a desk's width. A script put into it looks and tries, and
sends what it found to the page around it, which Chromium prints.
"""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import HOSTILE, rename, shown, spoil, write_full_run
from tests.reports import write_run
from tests.tiny import PATIENCE
from yopo.paper.beside import beside
from yopo.report.page import page
from yopo.report.records import read_runs

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium"),
]

LISTEN = """<script>
const errors = [], blocked = [];
addEventListener("error", (e) => errors.push(String(e.message)), true);
addEventListener("securitypolicyviolation", (e) => blocked.push(e.blockedURI));
for (const level of ["error", "warn"]) console[level] = (...words) => errors.push(words.join(" "));
</script>"""

LOOK = """<script>
addEventListener("load", () => setTimeout(() => {
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const visible = () => all(".accuracy .curve")
    .filter((c) => getComputedStyle(c).display !== "none")
    .map((c) => c.dataset.run + c.dataset.measure).sort();
  const click = (query) => { document.querySelector(query).click(); return visible(); };
  const press = (svg, key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const found = { errors, blocked, width: innerWidth, title: document.title, ran: window.ran };
  found.scroll = document.documentElement.scrollWidth;
  found.tops = ["h1", "table.runs", ".headline"].map((query) =>
    document.querySelector(query).getBoundingClientRect().top);
  found.requests = performance.getEntriesByType("resource").map((e) => e.name);
  found.charts = all(".accuracy .chart svg").map((svg) => {
    const frame = svg.getBoundingClientRect();
    return all(".curve", svg).map((c) => {
      const box = c.getBoundingClientRect();
      const inside = box.left >= frame.left && box.right <= frame.right && box.top >= frame.top;
      const line = c.querySelector("polyline"), colour = getComputedStyle(line).stroke;
      return [inside && box.bottom <= frame.bottom, line.getTotalLength(), colour];
    });
  });
  found.all = visible();
  found.noRun = click("button[data-run='1']");
  found.noClean = click("button[data-measure='clean']");
  found.pressed = all(".legend button").map((b) => b.getAttribute("aria-pressed"));
  click("button[data-run='1']");
  found.again = click("button[data-measure='clean']");
  const [chart] = all(".chart"), [svg] = all("svg", chart), [tip] = all(".tip", chart);
  const dot = svg.querySelector(".curve[data-run='2'].robust circle:last-of-type");
  const at = dot.getBoundingClientRect();
  const pointer = { clientX: at.x + at.width / 2, clientY: at.y + at.height / 2 };
  svg.dispatchEvent(new PointerEvent("pointermove", pointer));
  found.hover = [tip.textContent, dot.dataset.tip, getComputedStyle(tip).display];
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  found.left = getComputedStyle(tip).display;
  svg.focus();
  found.focused = document.activeElement === svg;
  found.walked = ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowUp"].map((key) => {
    press(svg, key);
    return tip.textContent;
  });
  const box = tip.getBoundingClientRect();
  found.tipInside = box.left >= 0 && box.right <= innerWidth;
  parent.postMessage(JSON.stringify(found), "*");
}, 50));
</script>"""

AROUND = """<!doctype html><meta charset="utf-8"><pre id="found"></pre><script>
addEventListener("message", (e) => (document.getElementById("found").textContent = e.data));
</script><iframe src="report.html" style="width: {width}px; height: 900px; border: 0"></iframe>"""


def allow(element: str) -> str:
    """What lets the page's policy run our script too, and nothing else."""
    script = element.removeprefix("<script>").removesuffix("</script>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def look(folder: Path, text: str, width: int) -> dict[str, Any]:
    """Open a page and return what the script in it found."""
    text = text.replace("script-src ", f"script-src {allow(LISTEN)} {allow(LOOK)} ", 1)
    listening = re.sub(r"(?=<title>)", LISTEN.replace("\\", r"\\"), text, count=1)
    (folder / "report.html").write_text(listening.replace("</body>", f"{LOOK}</body>"))
    (folder / "around.html").write_text(AROUND.format(width=width))
    words = "--headless --no-sandbox --disable-gpu --virtual-time-budget=4000 --dump-dom".split()
    words += [f"--user-data-dir={folder / 'profile'}", "--window-size=1600,1000"]
    command = [CHROMIUM, *words, (folder / "around.html").as_uri()]
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout
    printed = re.search(r'<pre id="found">(.+?)</pre>', shown, re.DOTALL)
    assert printed, shown[:2000]
    found: dict[str, Any] = json.loads(html.unescape(printed[1]))
    return found


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The page on three runs, one of a name that is longer than a phone is wide."""
    methods = {"natural": {"name": "natural"}, "pgd": {"name": "pgd"}, "yopo-" * 20: {}}
    warnings = [{"code": "masked", "text": "word" * 100}]
    runs = [
        write_run(tmp_path / "runs" / name, {"method": method}, warnings=warnings)
        for name, method in methods.items()
    ]
    read = read_runs(runs)
    return page(read, paper=beside(read, "table1"))


@pytest.mark.parametrize("width", [390, 1280])
def test_page_works_alone(tmp_path: Path, text: str, width: int) -> None:
    found = look(tmp_path, text, width)
    assert found["errors"] == found["blocked"] == found["requests"] == []
    assert found["width"] == width
    assert found["scroll"] <= width
    title, accuracies, sentences = found["tops"]
    first = accuracies < sentences if width < 640 else sentences < accuracies
    assert first, "on a phone the accuracies come first, on a desk what they say"
    assert title < min(accuracies, sentences) < 250
    every = {f"{run}{measure}" for run in range(3) for measure in ("clean", "robust")}
    for chart in found["charts"]:
        assert len(chart) == len(every)
        assert all(inside and length > 20 for inside, length, _ in chart)
        assert len({colour for *_, colour in chart}) == 3
    assert set(found["all"]) == set(found["again"]) == every
    assert len(found["all"]) == 2 * len(every)
    assert set(found["noRun"]) == {name for name in every if name[0] != "1"}
    assert set(found["noClean"]) == {"0robust", "2robust"}
    assert found["pressed"] == ["true", "false", "true", "true", "false"]
    said, words, display = found["hover"]
    assert said == words
    assert "epoch 4: pgd-3" in said
    assert display != "none"
    assert found["left"] == "none"
    assert found["focused"]
    first, second, third, other = found["walked"]
    assert ["epoch 1:" in first, "epoch 2:" in second, "epoch 3:" in third] == [True] * 3
    assert other
    assert other.split(",")[0] == third.split(",")[0]  # the same run's other curve
    assert "clean" in other
    assert found["tipInside"]


def test_the_checks_can_fail(tmp_path: Path, text: str) -> None:
    ours = "<script>no()</script>"
    bad = (
        f'<img src="http://127.0.0.1:9/x.png"><svg width="600"></svg>{ours}'
        '<p style="color: red">-</p><script>document.title = "ran"</script>'
    )
    allowed = text.replace("script-src ", f"script-src {allow(ours)} ", 1)
    found = look(tmp_path, allowed.replace("</h1>", f"</h1>{bad}", 1), 390)
    assert sorted(found["blocked"]) == ["http://127.0.0.1:9/x.png", "inline", "inline"]
    assert any("no is not defined" in error for error in found["errors"])
    assert found["scroll"] > 390


@pytest.mark.parametrize("policy", [True, False])
def test_hostile_words_run_nothing_and_fetch_nothing(tmp_path: Path, policy: bool) -> None:
    """Every word that the report reads is hostile; the page is tame without its policy, too."""
    folders = []
    for i in range(3):
        folder = write_full_run(tmp_path / f"run{i}")
        assert spoil(folder, partial(_evil, i)) > 40
        folders.append(rename(folder, HOSTILE[i]))
    text = shown(*folders)
    assert text is not None
    if not policy:
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert ("Content-Security-Policy" in text) == policy
    found = look(tmp_path, text, 1280)
    assert found["errors"] == found["blocked"] == found["requests"] == []
    assert found["title"] == "Adversarial training: 3 runs"
    assert "ran" not in found
    bad = look(tmp_path, text.replace("</h1>", f"</h1>{HOSTILE[0]}", 1), 1280)
    assert bad["blocked"] if policy else bad["ran"] == 1


def _evil(start: int, n: int) -> str:
    return HOSTILE[(start + n) % len(HOSTILE)]
