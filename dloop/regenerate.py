"""Stage 2: regeneration. The target answers the prompts itself, and its answers become the training data.

In: prompts (JSONL). Out: conversations with the target's own answers, beside them an error and a skipped file; every
input line ends in exactly one of the three, whatever dies on the way (`--resume`). The target is served by
OpenAI-compatible servers, running ones or its own, or answers in this process. Knows no draft and no training.

    python -m dloop.regenerate --model M --input-file-path P --output-file-path O --server-address host:port ...
    python -m dloop.regenerate --model M --input-file-path P --output-file-path O --launch-servers 8
    python -m dloop.regenerate --model M --input-file-path P --output-file-path O --shard 1-of-2 --device cpu
    python -m dloop.regenerate --merge SHARD ... --input-file-path P --output-file-path O --stats stats.json
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dloop.cli import UserError, parse, run
from dloop.regeneration.server_processes import SGLANG, ServerCommand, ServerProcesses

if TYPE_CHECKING:
    from dloop.regeneration.dialogue import Dialogue
    from dloop.regeneration.ledger import Ledger
    from dloop.regeneration.selection import Selection
    from dloop.regeneration.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Options:
    """Let the target answer the prompts of a file, on servers or in this process."""

    model: str | None = None
    """The target: folder or hub repository; with servers the name they serve it under. Not needed to merge."""
    revision: str | None = None
    """Revision of the target on the hub (not with --server-address)."""
    input_file_path: Path | None = None
    """Prompts, one conversation a line. With --merge optional: it lets the merge check that no line is missing."""
    output_file_path: Path
    """Output (JSONL); its error and skipped rows go to <output>_error.jsonl and <output>_skipped.jsonl."""
    server_address: tuple[str, ...] = ()
    """Running servers as host:port. None: the target answers in this process."""
    launch_servers: int = 0
    """Start so many servers on this machine, one a GPU, and end them with this run."""
    server_command: str = SGLANG
    """How a server is started, with {model} and {port} filled in; it must answer GET /health once it is ready."""
    server_start_timeout: float = 1800.0
    """Seconds a launched server may take until it is ready."""
    temperature: float = 0.7
    """Sampling temperature in [0, 1]; 0 takes the likeliest token."""
    top_p: float | None = None
    """Draw from the smallest set of tokens with this probability."""
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    max_tokens: int = 4096
    """Most tokens of an answer."""
    reasoning: Literal["none", "save", "disable"] = "disable"
    """Thinking: disable it, save it beside the answers, or (none, servers only) say nothing about it."""
    num_samples: int | None = None
    """Only the first N rows of the input."""
    shard: str | None = None
    """i-of-n: only the lines whose 0-based number modulo n is i - 1."""
    merge: tuple[Path, ...] = ()
    """Join these outputs of shards instead of answering; rows are sorted by line."""
    resume: bool = False
    """Go on with existing output files; error rows are tried again."""
    overwrite: bool = False
    """Begin anew; with --resume only if the files were made with other settings."""
    stats: Path | None = None
    """Also write the accounting to this file (JSON)."""
    concurrency: int = 64
    """Requests at a time, for each server."""
    request_timeout: float = 3600.0
    """Seconds to wait for one answer of a server."""
    batch_size: int = 64
    """In this process: input lines answered together."""
    seed: int = 0
    """In this process: seed of the sampling; servers are not given one."""
    device: str | None = None
    """In this process: device of the target (default: cuda if there is one, else cpu)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """In this process: dtype of the target (default: bfloat16 on cuda, else float32)."""

    @property
    def on_servers(self) -> bool:
        """Whether servers answer, not this process."""
        return bool(self.server_address or self.launch_servers)

    def check(self) -> None:
        """Raise `UserError` for values that cannot be."""
        if not 0 <= self.temperature <= 1:
            raise UserError(f"--temperature is {self.temperature}, but must be between 0 and 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}, but must be above 0 and at most 1")
        for name in ("top_k", "max_tokens", "num_samples", "concurrency", "request_timeout", "batch_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"--{name.replace('_', '-')} is {value}, but must be above 0")
        if not self.merge and (self.model is None or self.input_file_path is None):
            raise UserError("--model and --input-file-path are needed, unless shards are joined with --merge")
        if self.server_address and self.launch_servers:
            raise UserError("--server-address names running servers, --launch-servers starts others: give one of them")
        if self.launch_servers < 0:
            raise UserError(f"--launch-servers is {self.launch_servers}, but cannot be below 0")
        if not self.on_servers and self.reasoning == "none":
            raise UserError("--reasoning none leaves thinking to a server; in this process use disable or save")


def resolved(options: Options) -> Options:
    """The options with device and dtype filled in, where this process has use for them."""
    if options.on_servers:
        return options
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return replace(
        options, device=device, dtype=options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    )


def settings(options: Options, selection: "Selection") -> dict[str, Any]:
    """What decides the answers: must be the same when a run is resumed."""
    shared = ("model", "temperature", "top_p", "top_k", "max_tokens", "reasoning", "shard")
    local = () if options.on_servers else ("revision", "batch_size", "seed", "device", "dtype")
    values = {name: getattr(options, name) for name in shared + local}
    values |= {"in_process": not options.on_servers, "input_sha256": selection.digest}
    if options.launch_servers and options.revision is not None:
        values["revision"] = options.revision
    return values if options.on_servers else values | {"weights": weights_stamp(Path(str(options.model)))}


def weights_stamp(folder: Path) -> str | None:
    """Changes when a target in a local folder is trained again under the same name; None for a hub repository."""
    import hashlib

    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest() if stamps else None


def launch_and_ask(options: Options, selection: "Selection", ledger: "Ledger", advance: Any) -> None:
    """Answer what is not done on servers that live as long as this takes."""
    command = ServerCommand(
        model=str(options.model),
        revision=options.revision,
        template=options.server_command,
        seconds_to_start=options.server_start_timeout,
    )
    log = options.output_file_path.with_name(options.output_file_path.name.removesuffix(".jsonl") + "_server")
    print(f"starting {options.launch_servers} servers (their output: {log}_*.log)", flush=True)
    with ServerProcesses(command, options.launch_servers, log) as servers:
        ask_servers(replace(options, server_address=servers.addresses), selection, ledger, advance)


def ask_servers(options: Options, selection: "Selection", ledger: "Ledger", advance: Any) -> None:
    """Answer what is not done through the servers of the options."""
    import asyncio

    from tqdm import tqdm

    from dloop.regeneration.dialogue import Outcome
    from dloop.regeneration.dispatch import Dispatcher
    from dloop.regeneration.servers import Patience, RequestForm, Server

    patience = Patience(request=options.request_timeout)
    form = RequestForm(
        model=str(options.model),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        reasoning=options.reasoning,
    )

    def deliver(outcome: Outcome) -> None:
        advance(ledger.write([outcome]))

    async def dispatch() -> None:
        servers = [Server(address, form, patience, options.concurrency) for address in options.server_address]
        rows = open_dialogues(options, selection, ledger, advance)
        await Dispatcher(servers, rows, deliver, patience, tqdm.write).run(options.concurrency)

    asyncio.run(dispatch())


def open_dialogues(options: Options, selection: "Selection", ledger: "Ledger", advance: Any) -> "Iterator[Dialogue]":
    """The dialogues still to be answered, in the order of the input; rows that cannot be asked are written off."""
    from dloop.data.conversations import RowError
    from dloop.regeneration.dialogue import open_dialogue, skipped

    for line, raw in selection.lines():
        if ledger.is_done(line):
            continue
        try:
            dialogue = open_dialogue(line, raw, options.reasoning)
        except RowError as error:
            advance(ledger.write([skipped(line, raw, error)]))
        else:
            yield dialogue


def answer_here(options: Options, selection: "Selection", ledger: "Ledger", advance: Any) -> None:
    """Answer what is not done with the target loaded into this process."""
    import torch

    from dloop.hosts.target_model import DTYPES, load_target, load_tokenizer
    from dloop.regeneration.in_process import LocalTarget, answer_batches
    from dloop.regeneration.sampling import Sampling

    name, device = str(options.model), torch.device(str(options.device))
    tokenizer = load_tokenizer(name, options.revision)
    model = load_target(name, dtype=DTYPES[str(options.dtype)], device=device, revision=options.revision)
    sampling = Sampling(
        temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, max_tokens=options.max_tokens
    )
    target = LocalTarget(model, tokenizer, sampling, options.reasoning)
    answer_batches(target, selection, ledger, batch_size=options.batch_size, seed=options.seed, advance=advance)


def regenerate(options: Options) -> "Tally":
    """Answer every line the options ask for; returns the accounting, which adds up."""
    from tqdm import tqdm

    from dloop.regeneration.ledger import Ledger
    from dloop.regeneration.selection import select

    selection = select(Path(str(options.input_file_path)), options.shard, options.num_samples)
    options = resolved(options)
    ledger = Ledger(
        options.output_file_path,
        selection,
        settings(options, selection),
        resume=options.resume,
        overwrite=options.overwrite,
    )
    work = launch_and_ask if options.launch_servers else ask_servers if options.server_address else answer_here
    done = ledger.tally.rows.total()
    with ledger, tqdm(total=selection.count, initial=done, desc="regenerate", unit="row", smoothing=0.05) as bar:
        if done < selection.count:
            work(options, selection, ledger, bar.update)
    ledger.tally.check(selection.count)
    return ledger.tally


def merge_shards(options: Options) -> "Tally":
    """Join the shards of the options."""
    from dloop.regeneration.merge import merge
    from dloop.regeneration.selection import select

    path = options.input_file_path
    selection = select(path, num_samples=options.num_samples) if path else None
    return merge(options.merge, options.output_file_path, selection)


def main() -> None:
    """Command line; exit code 1 if more than 0.1 % of the rows are errors."""
    from dloop.results.atomic import write_json

    options = parse(Options)
    options.check()
    tally = merge_shards(options) if options.merge else regenerate(options)
    print(tally.text())
    if options.stats is not None:
        write_json(options.stats, tally.summary())
    if tally.failed:
        print("too many error rows; run again with --resume to retry them", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
