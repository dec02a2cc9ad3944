"""How fast a training reads its data at the paper's size: index, rows, and the start near the end of an epoch.

    python -m benchmarks.loading                    1.4 million generated rows, about 2.3 GB in a temporary folder
    python -m benchmarks.loading --rows 20000

Each part runs in a process of its own, so that its peak memory is its own. Rows are read as a training reads them:
shuffled, rendered with a chat template, tokenised and masked; the tokenizer is the demo's, trained here.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dloop.cli import parse, run

WORDS = [f"word{number}" for number in range(4000)]
DIFFERENT_ROWS = 2000
WORLD = 64
"""Processes of the paper's run; its epoch has as many steps as each of them has rows."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure index, iteration and start of the training loader on a generated file."""

    rows: int = 1_420_909
    """Rows of the file; the default is PerfectBlend's number."""
    samples: int = 2000
    """Rows that are tokenised for the rate."""
    folder: Path | None = None
    """Where the file is generated; default: a temporary folder."""
    part: str = ""
    """Run one part on the file in the folder: index, rows, samples or resume."""


def generate(options: Options, folder: Path) -> Path:
    """The file: two turns a row, about 1.6 kB, every row another text."""
    path = folder / "conversations.jsonl"
    words = random.Random(0)
    texts = [" ".join(words.choices(WORDS, k=words.randrange(20, 200))) for _ in range(DIFFERENT_ROWS)]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(options.rows):
            question, answer = texts[number % DIFFERENT_ROWS], texts[(number * 7 + 1) % DIFFERENT_ROWS]
            turns = [{"role": "user", "content": f"{number} {question}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": str(number), "conversations": turns}) + "\n")
    return path


def index_part(path: Path, options: Options) -> str:
    """Build the index; throw it away first."""
    from dloop.data.row_index import build_index

    for old in path.parent.glob("*.rows.npy"):
        old.unlink()
    began = time.perf_counter()
    build_index(path)
    seconds, size = time.perf_counter() - began, path.stat().st_size
    return f"index of {options.rows:,} rows, {size / 1e9:.2f} GB: {seconds:.1f} s ({size / seconds / 1e6:.0f} MB/s)"


def rows_part(path: Path, options: Options) -> str:
    """Read and parse every row in the order of an epoch."""
    from dloop.data.conversations import parse_row
    from dloop.data.loader import epoch_order
    from dloop.data.row_index import RowFile

    rows = RowFile(path)
    began = time.perf_counter()
    order = epoch_order(len(rows), WORLD, epoch=0)
    shuffled = time.perf_counter() - began
    for row in order:
        parse_row(rows[int(row)])
    rate = len(order) / (time.perf_counter() - began - shuffled)
    return f"order of an epoch: {shuffled:.2f} s; every row read and parsed in it: {rate:,.0f} rows/s"


def samples_part(path: Path, options: Options) -> str:
    """Training samples of one rank, made in this process."""
    loader = open_loader(path, 0)
    began, tokens = time.perf_counter(), 0
    for number, batch in enumerate(loader):
        tokens += batch.input_ids.numel()
        if number + 1 == options.samples:
            break
    seconds, made = time.perf_counter() - began, number + 1
    return f"samples, one process: {made / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s"


def resume_part(path: Path, options: Options) -> str:
    """From nothing to the first batch, ten steps before the end of an epoch, the index being there."""
    began = time.perf_counter()
    steps = -(-options.rows // WORLD)
    next(iter(open_loader(path, max(0, steps - 10))))
    return f"first batch at step {steps - 10:,} of {steps:,}: after {time.perf_counter() - began:.2f} s"


def open_loader(path: Path, start: int):  # noqa: ANN201
    """The loader of rank 0 of 64, from batch `start`."""
    from transformers import AutoTokenizer

    from dloop.data.loader import ConversationDataset, training_loader

    tokenizer = AutoTokenizer.from_pretrained(path.parent / "tokenizer")
    dataset = ConversationDataset(path, tokenizer, "qwen", 4096)
    return training_loader(dataset, batch_size=1, rank=0, world_size=WORLD, epoch=0, start_batch=start)


PARTS = {"index": index_part, "rows": rows_part, "samples": samples_part, "resume": resume_part}


def peak_megabytes() -> float:
    """Most memory this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def make_tokenizer(folder: Path) -> None:
    """The demo's tokenizer, by its own two commands."""
    corpus = folder / "corpus"
    small = ["--conversations", "2000", "--prompts", "8"]
    for words in (
        ["dloop.demo.corpus", "--output-dir", corpus, *small],
        ["dloop.demo.tokenizer", "--corpus", corpus / "target_train.jsonl", "--output-dir", folder / "tokenizer"],
    ):
        subprocess.run([sys.executable, "-m", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def measure_all(options: Options, folder: Path) -> None:
    """Generate the file, then one process a part."""
    make_tokenizer(folder)
    began = time.perf_counter()
    generate(options, folder)
    print(f"generated in {time.perf_counter() - began:.0f} s", flush=True)
    for part in PARTS:
        words = ["--part", part, "--folder", folder, "--rows", options.rows, "--samples", options.samples]
        subprocess.run([sys.executable, "-m", "benchmarks.loading", *map(str, words)], check=True)


def main() -> None:
    """Measure, or run one part for a parent that does."""
    options = parse(Options)
    if options.part:
        assert options.folder is not None
        line = PARTS[options.part](options.folder / "conversations.jsonl", options)
        print(f"{line}; peak {peak_megabytes():,.0f} MB", flush=True)
    elif options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        measure_all(options, options.folder)
    else:
        with TemporaryDirectory() as folder:
            measure_all(options, Path(folder))


if __name__ == "__main__":
    run(main)
