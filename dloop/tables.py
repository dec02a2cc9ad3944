r"""From result files to tables and plots; decodes nothing, imports no torch.

    python -m dloop.tables --gpu cpu --experiments experiments.json --benchmarks gsm8k mbpp \
        --output results/tables/cpu --plots results/plots/cpu

One table a host (`dflash.md`, `.csv`, `.tex`), an `overview`, the `audit` of losslessness, five pictures, everything
on one page (`report.html`), and the main tables on the terminal; `docs/results.md` explains every column. Refuses
results made with other options than the experiments ask for, and results that must not be compared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    from dloop.reporting.collect import Collected
    from dloop.reporting.overview import Pair


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make tables and plots from result files."""

    experiments: str
    """The rows in their order: a JSON list of {target, host, setting, draft, flags}, or a file that holds it. A
    result whose stored options differ from `flags` is refused."""

    benchmarks: tuple[str, ...]
    """The columns in their order; of a path to a JSONL file the stem."""

    gpu: str
    """Slug of the GPU type: the folder below `baseline` and `eval`."""

    output: Path
    """Folder of the tables."""

    plots: Path
    """Folder of the pictures."""

    results: Path = Path("results")
    """Folder with `baseline/GPU/TARGET/BENCHMARK.json` and `eval/GPU/TARGET/HOST/SETTING/DRAFT/BENCHMARK.json`."""

    cost_table: tuple[Path, ...] = ()
    """Seconds by rows and stages, one file a target and host (python -m dloop.cost_table): adds the modelled speedup
    beside the measured one."""

    intervals: bool = False
    """Write 95 % intervals into the cells of the hosts' tables; the CSV files always hold them."""

    note: str | None = None
    """A remark shown with every table."""


def main() -> None:
    """Entry point of the tables rule."""
    make(parse(Options))


def make(options: Options) -> list[Path]:
    """Read the results, write all tables and pictures, show the main ones; returns the files for people."""
    from dloop.reporting.collect import collect, read_rows
    from dloop.reporting.modelled import read_cost_table
    from dloop.reporting.overview import pairs
    from dloop.reporting.plots import draw
    from dloop.reporting.terminal import show

    costs = [read_cost_table(path) for path in options.cost_table]
    rows = read_rows(_json(options.experiments))
    found = collect(options.results, options.gpu, rows, options.benchmarks, costs)
    lines = pairs(found)
    pictures = draw(found, lines, options.plots)
    written = _write(options, found, lines, pictures)
    show(found, lines, options.note, [*written, *pictures])
    return [*written, *pictures]


def _write(options: Options, found: "Collected", lines: Sequence["Pair"], pictures: Sequence[Path]) -> list[Path]:
    from dloop.reporting import auditing, html, latex, layout, markdown, overview
    from dloop.reporting.labels import HOSTS
    from dloop.results.atomic import write_text

    folder, note, intervals = options.output, options.note, options.intervals
    pages = {
        "overview.md": markdown.overview_page(found, lines, note, pictures, folder),
        "overview.csv": overview.frame(lines).to_csv(index=False),
        "overview.tex": latex.overview_table(found, lines, note),
    }
    for host in found.hosts:
        pages[f"{host}.md"] = markdown.host_page(found, host, lines, note, intervals=intervals)
        pages[f"{host}.csv"] = layout.tidy(found, host).to_csv(index=False)
        pages[f"{host}.tex"] = latex.host_table(found, host, note, intervals=intervals)
    pages["audit.md"] = auditing.page(found, folder)
    pages["audit.csv"] = auditing.frame(found).to_csv(index=False)
    titles = {"overview": "Overview", **{host: HOSTS.get(host, host) for host in found.hosts}, "audit": "Audit"}
    pages["report.html"] = html.report({name: (title, pages[f"{name}.md"]) for name, title in titles.items()}, pictures)
    for name, text in pages.items():
        write_text(folder / name, text)
    return [folder / name for name in pages if name.endswith((".md", ".html"))]


def _json(text_or_path: str) -> object:
    """A list given as text, or in a file."""
    try:
        inline = text_or_path.lstrip().startswith("[")
        return json.loads(text_or_path if inline else Path(text_or_path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--experiments {text_or_path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--experiments is not JSON: {error}") from None


if __name__ == "__main__":
    run(main)
