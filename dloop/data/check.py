"""What training would find in a conversations file: counts of rows, problems and tokens, and an example.

One streaming pass, nothing is changed or filtered. Without a tokenizer only rows and turns are counted.
`python -m dloop.data.check FILE [--tokenizer NAME --chat-template qwen --max-length 4096]`
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tqdm import tqdm

from dloop.cli import UserError, parse, run
from dloop.data.chat_template import find_template, kept_turns
from dloop.data.conversations import RowError, iter_lines, normalise, parse_row, refuse_json_array
from dloop.data.loss_mask import Encoded, Encoder
from dloop.data.preview import describe_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_BAD_ROWS = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """Count what training would find in a conversations file."""

    file: Annotated[Path, tyro.conf.Positional]
    """JSONL file with one conversation a line."""
    tokenizer: str | None = None
    """Hub id or folder of the target's tokenizer; without it no tokens are counted."""
    chat_template: str = "qwen"
    """How conversations are rendered."""
    system_prompt: str | None = None
    """System prompt of conversations without one, instead of the template's ("": none)."""
    max_length: int = 4096
    """Tokens of a row that are kept."""
    train_only_last_turn: bool = False
    """Supervise only the last answer of a conversation."""
    min_loss_tokens: int = 32
    """Rows with fewer supervised tokens are counted (other trainers drop rows below twice the block size)."""
    show: int = 1
    """Rows to print with their supervised parts marked."""


@dataclass
class Report:
    """Counts over a file; tokens are those that are kept. `examples` are the first usable rows, described."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    first_bad: list[str] = field(default_factory=list)
    leading_dropped: int = 0
    truncated: int = 0
    over_length: int = 0
    zero_loss: int = 0
    few_loss: int = 0
    tokens: int = 0
    supervised: int = 0
    examples: list[str] = field(default_factory=list)

    def counts(self, options: Options) -> Iterator[tuple[str, int]]:
        """Labels and counts in the order they are printed; token counts only where there was a tokenizer."""
        yield "rows", self.rows
        yield "unusable rows (replaced in training)", self.bad.total()
        yield from ((f"  {reason}", count) for reason, count in sorted(self.bad.items()))
        yield "rows that lose turns in front of the first user turn", self.leading_dropped
        yield "rows truncated at a turn that is out of place", self.truncated
        if options.tokenizer is not None:
            yield f"rows over {options.max_length} tokens (cut there)", self.over_length
            yield "rows without a supervised token (loss 0)", self.zero_loss
            yield f"rows with fewer than {options.min_loss_tokens} supervised tokens", self.few_loss
            yield "tokens", self.tokens
            yield "supervised tokens", self.supervised


def check_file(options: Options, tokenizer: PreTrainedTokenizerBase | None) -> Report:
    """One pass over the file. Raises `UserError` for a missing file, a JSON array, an unknown template."""
    encoder = _encoder(options, tokenizer)
    if not options.file.is_file():
        raise UserError(f"there is no file {options.file}: name a JSONL file with one conversation a line")
    refuse_json_array(options.file)
    report = Report()
    for line, raw in _with_progress(options.file):
        report.rows += 1
        try:
            messages = normalise(parse_row(raw))
            kept = kept_turns(messages)
            encoded = encoder(messages) if encoder else None
        except RowError as error:
            _count_bad(error, f"{options.file}:{line + 1}", report)
            continue
        report.leading_dropped += kept.dropped > 0
        report.truncated += kept.cut > 0
        if encoder and encoded:
            _count_tokens(encoded, encoder, options, report)
    return report


def _encoder(options: Options, tokenizer: PreTrainedTokenizerBase | None) -> Encoder | None:
    template = find_template(options.chat_template)
    if tokenizer is None:
        return None
    return Encoder(
        tokenizer=tokenizer,
        template=template,
        max_length=options.max_length,
        system_prompt=options.system_prompt,
        train_only_last_turn=options.train_only_last_turn,
    )


def _with_progress(path: Path) -> Iterator[tuple[int, bytes]]:
    with tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=path.name, delay=1) as progress:
        for line, raw in iter_lines(path):
            yield line, raw
            progress.update(len(raw) + 1)


def _count_bad(error: RowError, where: str, report: Report) -> None:
    report.bad[error.reason] += 1
    if len(report.first_bad) < _SHOWN_BAD_ROWS:
        report.first_bad.append(f"{where}: {error}")


def _count_tokens(encoded: Encoded, encoder: Encoder, options: Options, report: Report) -> None:
    supervised = sum(encoded.loss_mask)
    report.tokens += len(encoded.input_ids)
    report.supervised += supervised
    report.over_length += encoded.uncut_length > options.max_length
    report.zero_loss += supervised == 0
    report.few_loss += supervised < options.min_loss_tokens
    if len(report.examples) < options.show:
        report.examples.append(describe_tokens(encoded.input_ids, encoded.loss_mask, encoder.tokenizer))


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer {name!r} cannot be loaded: {error}") from error


def main() -> None:
    """Print the counts, the first unusable rows and some examples."""
    options = parse(Options)
    tokenizer = None if options.tokenizer is None else _load_tokenizer(options.tokenizer)
    with warnings.catch_warnings():
        # What the warnings say is counted here.
        warnings.simplefilter("ignore", UserWarning)
        report = check_file(options, tokenizer)
    print(options.file)
    for label, count in report.counts(options):
        print(f"{count:>14,}  {label}")
    for line in report.first_bad:
        print(line)
    for example in report.examples:
        print(f"example:\n{example}")


if __name__ == "__main__":
    run(main)
