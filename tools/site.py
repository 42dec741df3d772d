"""Look at the built site: every link leads somewhere, and pages work in Chromium, also on a phone.

`python -m tools.site site/html` (the end of `make docs`) prints what is wrong, and fails if
anything is. A word is searched for, too. Where there is no Chromium links alone are followed; in
CI, where $CI is true, that is a fault.
"""

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

WIDTHS = (390, 1280)
WORD = "co-state"  # on several pages
PATIENCE = 600  # seconds; a busy machine may need many
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), "")

DRIVER = """<!doctype html><meta charset="utf-8"><title>looking</title>
<pre id="found"></pre><script>
const todo = TODO, found = [];
const later = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {
  for (const [page, width] of todo) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    const loaded = new Promise((done) => (frame.onload = done));
    frame.src = page;
    document.body.append(frame);
    await loaded;
    const root = frame.contentDocument.documentElement, results = () =>
      root.querySelectorAll("ul.search li").length;
    const searched = () => /found/.test(root.querySelector(".search-summary")?.textContent);
    for (let i = 0; page.includes("?q=") && i < 100 && !searched(); i++) await later(100);
    const fetched = frame.contentWindow.performance.getEntriesByType("resource");
    const away = fetched.map((e) => e.name).filter((name) => !name.startsWith(location.origin));
    const broken = [...root.querySelectorAll("img")].filter((i) => i.complete && !i.naturalWidth);
    found.push({ page, width, wide: root.scrollWidth, results: results(), away,
      broken: broken.map((i) => i.src), title: frame.contentDocument.title });
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


class Page(HTMLParser):
    """What a page links to, and where it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note both."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            if value and name in ("href", "src"):
                self.links.add(value)


def pages(root: Path) -> list[Path]:
    """The HTML files of the site."""
    return sorted(root.rglob("*.html"))


def dead_links(root: Path) -> Iterator[str]:
    """Links within the site to a file or an anchor that is not there, and out of it by file."""
    read = {path: Page(path.read_text()) for path in pages(root)}
    for path, page in read.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme not in ("https", "http", "data", "mailto"):
                    yield f"{path.relative_to(root)}: {link}"
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            inside = to.is_relative_to(root.resolve()) and to.is_file()
            anchor = unquote(parts.fragment)
            if not inside or (anchor and to in read and anchor not in read[to].anchors):
                yield f"{path.relative_to(root)}: {link}"


class Quiet(SimpleHTTPRequestHandler):
    """The site's files, and the page that looks at them."""

    driver = ""

    def do_GET(self) -> None:
        """A file, or the driver."""
        if self.path != "/looking":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.driver.encode())
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def looked_at(root: Path, names: Iterable[str]) -> Iterator[str]:
    """What is wrong with pages of the site in Chromium, at a phone's and at a desk's width."""
    todo = [[f"/{name}", width] for name in names for width in WIDTHS]
    todo.append([f"/search.html?q={WORD}", WIDTHS[1]])
    handler = type("Driven", (Quiet,), {"driver": DRIVER.replace("TODO", json.dumps(todo))})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dom, said = chromium(f"http://127.0.0.1:{server.server_port}/looking")
    finally:
        server.shutdown()
        server.server_close()
    printed = re.search(r'<pre id="found">(.+?)</pre>', dom, re.DOTALL)
    if not printed:
        raise RuntimeError(f"Chromium did not finish:\n{said[-2000:]}")
    for line in re.findall(r"CONSOLE[^\]]*\] (.*)", said):
        yield f"console: {line}"
    for page in json.loads(html.unescape(printed[1])):
        where = f"{page['page']} at {page['width']} px"
        if page["wide"] > page["width"]:
            yield f"{where}: {page['wide']} px wide"
        yield from (f"{where}: fetches {name}" for name in page["away"])
        yield from (f"{where}: no picture {name}" for name in page["broken"])
        if "?q=" in page["page"] and page["results"] < 2:
            yield f"{where}: {page['results']} found"


def chromium(address: str) -> tuple[str, str]:
    """A page when its scripts have finished, and what Chromium said."""
    with tempfile.TemporaryDirectory() as profile:
        words = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom".split()
        words += ["--virtual-time-budget=300000", f"--user-data-dir={profile}"]
        command = [CHROMIUM, *words, "--window-size=1600,1000", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout, done.stderr


def faults(root: Path) -> list[str]:
    """What is wrong with a site."""
    wrong = [*dead_links(root)]
    if CHROMIUM:
        return [*wrong, *looked_at(root, [str(path.relative_to(root)) for path in pages(root)])]
    print("no Chromium: pages are not looked at", file=sys.stderr)
    if os.environ.get("CI") == "true":
        wrong.append("no Chromium, in which pages must be looked at")
    return wrong


def main() -> None:
    """Look, and say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    root = parser.parse_args().site.resolve()
    wrong = faults(root)
    print(*wrong, f"{len(pages(root))} pages, {len(wrong)} faults", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
