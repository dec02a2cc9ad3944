"""Rows of a data set on the Hugging Face hub, or of a mirror of it on disk.

The one place that talks to the hub about data sets. It resolves the revision first, so that results can
record which one they saw, and says plainly when the hub cannot be reached. It knows nothing about prompts or
benchmarks.
Environment: `DLOOP_HUB_MIRROR` names a folder with `<owner>/<name>/` folders, each laid out as the data set's
repository; `HF_HUB_OFFLINE=1` reads the library's own cache; `HF_ENDPOINT` is another hub.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dloop.cli import UserError

MIRROR_VARIABLE = "DLOOP_HUB_MIRROR"
_RESOLVE_TIMEOUT = 20.0
_ADVICE = (
    f"set {MIRROR_VARIABLE} to a folder with a copy, or HF_HUB_OFFLINE=1 to use what was downloaded before"
)


def load_hub_rows(
    hub_id: str,
    *,
    config: str | None = None,
    split: str,
    revision: str | None = None,
    files: Sequence[str] | None = None,
) -> tuple[Sequence[dict[str, Any]], str | None]:
    """The rows of one split (memory-mapped, with `len` and indexing) and the revision they come from.

    `files` names JSON-lines files of the repository, read in this order instead of its own split; `split` is
    then only a label. The revision is the commit hash, None where a mirror or a bare cache does not tell it.
    Raises `UserError` if the hub, the data set, the configuration or a file cannot be had.
    """
    mirror = os.environ.get(MIRROR_VARIABLE)
    if mirror:
        return _load(hub_id, str(_mirror_folder(Path(mirror), hub_id)), config, split, None, files), None
    resolved = _resolve(hub_id, revision)
    rows = _load(hub_id, hub_id, config, split, resolved or revision, files)
    return rows, resolved or _revision_of(rows)


def _mirror_folder(mirror: Path, hub_id: str) -> Path:
    folder = mirror / hub_id
    if not folder.is_dir():
        raise UserError(
            f"{MIRROR_VARIABLE} is {mirror}, but that folder holds no {hub_id}/: "
            "copy the files of the data set's repository there"
        )
    return folder


def _resolve(hub_id: str, revision: str | None) -> str | None:
    """The commit hash behind `revision` (default branch if None); None in offline mode."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(hub_id, revision=revision, timeout=_RESOLVE_TIMEOUT).sha
    except HfHubHTTPError as error:
        raise UserError(
            f"the hub refuses the data set {hub_id} (revision {revision or 'default'}): {error}"
        ) from error
    # The transport's exceptions belong to whichever HTTP library the installed huggingface_hub was built on.
    except Exception as error:
        raise UserError(
            f"the hub at {constants.ENDPOINT} cannot be reached for {hub_id} "
            f"({type(error).__name__}: {error}): {_ADVICE}"
        ) from error


def _load(
    hub_id: str,
    source: str,
    config: str | None,
    split: str,
    revision: str | None,
    files: Sequence[str] | None,
) -> Any:
    import datasets

    try:
        if files:
            paths = [_local_file(source, name, revision) for name in files]
            return datasets.load_dataset("json", data_files=paths, split="train")
        return datasets.load_dataset(source, **_selection(source, config), split=split, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"the data set {hub_id} (split {split}) could not be loaded: {error}; {_ADVICE}"
        ) from error


def _selection(source: str, config: str | None) -> dict[str, str | None]:
    """A mirror without the data card has no named configurations, but by custom each has its own folder."""
    folder = Path(source)
    if config and (folder / config).is_dir() and not (folder / "README.md").exists():
        return {"data_dir": config}
    return {"name": config}


def _local_file(source: str, name: str, revision: str | None) -> str:
    if Path(source).is_dir():
        return str(Path(source) / name)
    from huggingface_hub import hf_hub_download

    return hf_hub_download(source, name, repo_type="dataset", revision=revision)


def _revision_of(rows: Any) -> str | None:
    """The commit hash in the addresses the rows came from, as the library's cache remembers them."""
    addresses = rows.info.download_checksums or {}
    hashes = {match[1] for address in addresses if (match := re.search(r"@([0-9a-f]{40})/", address))}
    return hashes.pop() if len(hashes) == 1 else None
