"""How many rows a second the regeneration's client alone can ask for: against a server that answers at once.

    python -m benchmarks.regeneration_client
    python -m benchmarks.regeneration_client --rows 20000 --concurrency 128

The server is a process of its own that reads a request and writes a prepared answer; what is measured is the whole
command, start included, and the processor time it used.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dloop.cli import parse, run

ANSWER_WORDS = 300


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the client of the regeneration."""

    rows: int = 10_000
    """Input rows, one question each."""
    concurrency: int = 128
    """Requests at a time."""
    serve: bool = False
    """Be the server: print its port, then answer until killed."""


def prepared_answer() -> bytes:
    """A chat completion as HTTP."""
    message = {"role": "assistant", "content": "word " * ANSWER_WORDS}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = json.dumps(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    ).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read requests by their length, answer each with the same bytes."""
    answer = prepared_answer()
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve() -> None:
    """Listen on loopback."""
    server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def measure(options: Options, folder: Path) -> None:
    """Run the command against the server and print what it took."""
    source = folder / "prompts.jsonl"
    turns = [{"role": "user", "content": "why " * 50}]
    source.write_text((json.dumps({"conversations": turns}) + "\n") * options.rows)
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.regeneration_client", "--serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        words = ["--model", "m", "--input-file-path", source, "--output-file-path", folder / "out.jsonl"]
        words += ["--server-address", f"127.0.0.1:{port}", "--concurrency", options.concurrency]
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dloop.regenerate", *map(str, words)], check=True)
        seconds = time.perf_counter() - began
    finally:
        server.kill()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    print(
        f"{options.rows:,} rows, {options.concurrency} at a time: {options.rows / seconds:,.0f} rows/s, "
        f"{1000 * processor / options.rows:.2f} ms of processor time a row "
        f"(load of the machine: {os.getloadavg()[0]:.1f})"
    )


def main() -> None:
    """Measure, or be the server."""
    options = parse(Options)
    if options.serve:
        asyncio.run(serve())
    else:
        with TemporaryDirectory() as folder:
            measure(options, Path(folder))


if __name__ == "__main__":
    run(main)
