"""All tables and pictures as one page: no other file, no network, readable years later.

The Markdown pages are the source: rendered, joined, their pictures put inside.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
:root { color-scheme: light; --ink: #222; --soft: #666; --line: #ddd; --accent: #1f4e79; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 76rem; margin: 0 auto; padding: 1rem; }
nav { position: sticky; top: 0; background: #fff; border-bottom: 1px solid var(--line); padding: .5rem 0; z-index: 1; }
nav a { margin-right: 1.2rem; }
a { color: var(--accent); }
h1 { margin: 2rem 0 .5rem; font-size: 1.5rem; scroll-margin-top: 3rem; }
h2 { margin: 1.4rem 0 .4rem; font-size: 1.15rem; }
blockquote { margin: .5rem 0; padding: .1rem 1rem; border-left: 4px solid var(--accent); background: #f4f7fa; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); }
th { border-bottom: 2px solid var(--ink); text-align: left; }
tr:hover td { background: #f4f7fa; }
td strong { color: var(--accent); }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; }
figcaption { color: var(--soft); }
"""

CAPTIONS = {
    "speedup": "Speedup by benchmark with 95 % intervals; the dashed line is the target alone.",
    "acceptance_length": "Tokens a round yields: the released draft as bars, DLoop as a line.",
    "extra_stages": "How often the gate let another stage follow.",
    "round_time": "Where the time of a round goes, and what a token costs.",
    "gate": "Speedup at other gates, predicted from the recorded rounds; diamonds are measured.",
}
"""What each picture shows, by file name."""


def report(pages: Mapping[str, tuple[str, str]], pictures: Sequence[Path]) -> str:
    """One HTML page of Markdown pages, (title, text) by the name others link to; pictures stand behind the first."""
    sections = [
        f'<section id="{name}">\n{_rendered(page)}{_figures(pictures) if place == 0 else ""}</section>'
        for place, (name, (_, page)) in enumerate(pages.items())
    ]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, (title, _) in pages.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>DLoop results</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<nav>{links}</nav>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def _rendered(page: str) -> str:
    # The pages' own pictures and links between them are files; here everything is on one page.
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", page)
    page = re.sub(r"\]\(([a-z0-9.-]+)\.md\)", r"](#\1)", page)
    html = str(MarkdownIt("commonmark", {"html": False}).enable("table").render(page))
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def _figures(pictures: Sequence[Path]) -> str:
    return "".join(
        f'<figure><img alt="{_caption(path)}" src="data:image/svg+xml;base64,{_base64(path)}">'
        f"<figcaption>{_caption(path)}</figcaption></figure>\n"
        for path in pictures
    )


def _caption(path: Path) -> str:
    return CAPTIONS.get(path.stem, path.stem.replace("_", " "))


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")
