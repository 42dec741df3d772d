"""tools/site.py finds what is wrong with a built site, in its links and in Chromium."""

import sys
from pathlib import Path

import pytest

from tools import site

BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(not site.CHROMIUM, reason="needs Chromium"),
]
SEARCH = """<p class="search-summary">found 2</p>
<ul class="search"><li>one</li><li>two</li></ul>"""
RIGHT = {
    "index.html": '<p id="top">Here</p><a href="more/page.html#there">on</a><a href="#top">up</a>',
    "more/page.html": '<p id="there">There</p><a href="../index.html">back</a>',
    "search.html": SEARCH,
}
WRONG = {
    "dead anchor": ('<a href="more/page.html#nowhere">', "index.html: more/page.html#nowhere"),
    "dead anchor here": ('<a href="#nowhere">', "index.html: #nowhere"),
    "dead link": ('<a href="gone.html">', "index.html: gone.html"),
    "out of the site": ('<a href="../../etc/passwd">', "index.html: ../../etc/passwd"),
    "by file": ('<a href="file:///etc/passwd">', "index.html: file:///etc/passwd"),
}
SEEN = {
    "console": ("<script>console.error('oh no')</script>", "console:"),
    "thrown": ("<script>nothing.at.all</script>", "console:"),
    "wide": ('<div style="width: 700px">wide</div>', "/index.html at 390 px: "),
    "away": ('<img src="http://127.0.0.1:9/a.png">', "/index.html at 390 px: fetches http://127.0"),
}


def written(folder: Path, more: str = "", **over: str) -> Path:
    for name, body in (RIGHT | over).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        words = body + more * (name == "index.html")
        file.write_text(f"<!doctype html><title>{name}</title>{words}", encoding="utf-8")
    return folder


def test_a_site_without_faults_has_none(tmp_path: Path) -> None:
    assert list(site.dead_links(written(tmp_path))) == []


@pytest.mark.parametrize("kind", WRONG)
def test_dead_links_are_found(kind: str, tmp_path: Path) -> None:
    more, fault = WRONG[kind]
    assert list(site.dead_links(written(tmp_path, more))) == [fault]


class TestInChromium:
    pytestmark = BROWSER

    def test_a_site_without_faults_has_none(self, tmp_path: Path) -> None:
        assert site.faults(written(tmp_path)) == []

    def test_what_is_seen(self, tmp_path: Path) -> None:
        """All on one page, since each start takes seconds; and a word that is not found."""
        more = "".join(words for words, _ in SEEN.values())
        nothing = {"search.html": SEARCH.replace("<li>two</li>", "")}
        found = site.faults(written(tmp_path, more, **nothing))
        for fault in (fault for _, fault in SEEN.values()):
            assert any(line.startswith(fault) for line in found), found
        assert any("oh no" in line for line in found)
        assert any("nothing is not defined" in line for line in found)
        assert f"/search.html?q={site.WORD} at 1280 px: 1 found" in found


def test_without_chromium_links_alone_are_followed_but_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "CHROMIUM", "")
    monkeypatch.setattr(sys, "argv", ["site", str(written(tmp_path))])
    for ci, status in (("true", 1), ("", 0)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(SystemExit) as stopped:
            site.main()
        assert stopped.value.code == status
        told = capsys.readouterr()
        assert "no Chromium: pages are not looked at" in told.err
        assert told.out.endswith(f"3 pages, {status} faults\n")
