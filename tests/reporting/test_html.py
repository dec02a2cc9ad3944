"""The page with everything: self-contained, and rendered without an error by a browser where there is one."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from dloop import tables
from dloop.cli import parse
from tests.reporting.tree import arguments, build

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    listed = build(root, benchmarks=["gsm8k", "mbpp"], prompts=2, ties=0.5)
    words = arguments(root, listed, "--note", "A note & <more>.", benchmarks=["gsm8k", "mbpp"])
    tables.make(parse(tables.Options, words))
    return root / "tables" / "cpu" / "report.html"


class Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def seen(page):
    parser = Seen()
    parser.feed(page.read_text())
    assert not parser.open
    return parser


def test_the_page_holds_every_table_and_needs_no_other_file(page):
    parser = seen(page)
    assert parser.tags.count("table") == 1 + 2 + 1
    assert parser.tags.count("img") == 5
    assert "script" not in parser.tags
    ids = set(re.findall(r'id="([^"]+)"', page.read_text()))
    for link in parser.links:
        # The audit links result files, which lie beside the page; nothing else leaves it.
        assert link.startswith("data:") or link.removeprefix("#") in ids or link.startswith("../../eval/")
    assert "A note &amp; &lt;more&gt;." in page.read_text()


def test_its_pictures_are_whole(page):
    for content in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page.read_text()):
        assert ElementTree.fromstring(base64.b64decode(content)).tag.endswith("svg")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page is only parsed here")
def test_a_browser_renders_it_without_an_error(page, tmp_path):
    shot = tmp_path / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,3000", f"--screenshot={shot}"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    assert shot.stat().st_size > 50_000, "a blank page is smaller"
