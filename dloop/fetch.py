"""Downloads what a configuration asks of the hub, so that compute nodes without internet can run from the cache.

    python -m dloop.fetch config/config.yaml

Targets, drafts, benchmarks and prompts, each at its configured revision. The hub's own library continues interrupted
downloads; large files, which it keeps under their checksum, are read once more and compared. Loads no model.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from dloop.cli import UserError, parse, run

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
"""Weights, configuration and tokenizer; no code."""
_SHA256_LENGTH = 64
_BLOCK = 1 << 24


def fetch_model(repository: str, revision: str | None) -> Path:
    """The folder of a model in the cache, complete. Raises `UserError` if the hub does not give it."""
    from huggingface_hub import snapshot_download

    from dloop.hosts.checkpoint_files import PICKLED

    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=PATTERNS))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(repository, revision=revision, allow_patterns=PICKLED)
    except Exception as error:  # the transport's exceptions belong to whichever library the hub's is built on
        lines = str(error).strip().splitlines() or [""]
        raise UserError(
            f"{repository} at {revision or 'its newest revision'} cannot be downloaded ({type(error).__name__}: "
            f"{lines[0]}): check name, revision and access, then call this again; it goes on where it was"
        ) from error
    for file in damaged(folder):
        raise UserError(f"{file} is not what the hub announced: delete {file.resolve()} and call this again")
    return folder


def damaged(folder: Path) -> Iterator[Path]:
    """Files of a cached model whose contents are not those of their checksum; small files have none."""
    for file in sorted(folder.rglob("*")):
        announced = file.resolve().name
        if file.is_file() and len(announced) == _SHA256_LENGTH and sha256(file) != announced:
            yield file


def sha256(file: Path) -> str:
    """Checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fetch_data(values: Any, names: list[str]) -> Iterator[str]:
    """Load the benchmarks `names` and the prompts of the configuration once; a line about each."""
    from dloop.data.benchmarks import BENCHMARKS
    from dloop.data.hub import load_hub_rows
    from dloop.prompts import HUB_IDS

    for name in names:
        if name in BENCHMARKS and "file" not in values["benchmarks"][name]:
            source = BENCHMARKS[name]
            rows, revision = load_hub_rows(
                source.hub_id, config=source.config, split=source.split, revision=source.revision, files=source.files
            )
            yield f"{name}: {len(rows)} rows of {source.hub_id}, revision {revision}"
    flags = values["prompts"].get("flags", {})
    if "data_path" not in flags:
        hub_id = HUB_IDS[values["prompts"]["dataset"]]
        rows, revision = load_hub_rows(hub_id, split="train", revision=flags.get("revision"))
        yield f"prompts: {len(rows)} rows of {hub_id}, revision {revision}"


@dataclass(frozen=True)
class Options:
    """Download everything a configuration file names, into the hub's cache."""

    configuration: Annotated[Path, tyro.conf.Positional]
    """The configuration, as config/config.yaml."""


def main() -> None:
    """Download everything a configuration file names."""
    import os

    from dloop.config import Configuration, read_file

    plan = Configuration(read_file(parse(Options).configuration))
    os.environ.update(plan.hub_environment() | {"HF_HUB_OFFLINE": "0"})  # before the hub's library is imported
    for repository, revision in plan.repositories():
        folder = fetch_model(repository, revision)
        print(f"{repository}: {folder.name}, {sum(file.stat().st_size for file in folder.rglob('*')) / 1e9:.2f} GB")
    for line in fetch_data(plan.values, plan.benchmarks):
        print(line, flush=True)


if __name__ == "__main__":
    run(main)
