"""Rows of a data set on the Hugging Face hub, or of a mirror of it on disk.

The one place that talks to the hub about data sets. It resolves the revision first, so that results can
record which one they saw, and says plainly when the hub cannot be reached. It knows nothing about prompts or
benchmarks. Environment: `DLOOP_HUB_MIRROR` names a folder with `<owner>/<name>/` folders, each laid out as
the data set's repository; `HF_HUB_OFFLINE=1` reads the library's own cache; `HF_ENDPOINT` is another hub.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dloop.cli import UserError

MIRROR_VARIABLE = "DLOOP_HUB_MIRROR"
_RESOLVE_SECONDS = 20.0
_ADVICE = f"set {MIRROR_VARIABLE} to a folder with a copy, or HF_HUB_OFFLINE=1 to use what was downloaded before"
_COMMIT = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")


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
    then only a label. The revision is the commit hash, None for a mirror, which cannot tell it.
    Raises `UserError` if the hub, the data set, the configuration or a file cannot be had.
    """
    mirror = os.environ.get(MIRROR_VARIABLE)
    try:
        if mirror:
            return _from_mirror(_mirror_folder(Path(mirror), hub_id), config, split, files), None
        return _from_hub(hub_id, config, split, revision, files)
    except (OSError, ValueError, _datasets_error()) as error:
        raise UserError(
            f"the data set {hub_id} (split {split}) could not be loaded: {_first_line(error)}; {_ADVICE}"
        ) from error


def _mirror_folder(mirror: Path, hub_id: str) -> Path:
    folder = mirror / hub_id
    if not folder.is_dir():
        raise UserError(
            f"{MIRROR_VARIABLE} is {mirror}, but that folder holds no {hub_id}/: "
            "copy the files of the data set's repository there"
        )
    return folder


def _from_mirror(folder: Path, config: str | None, split: str, files: Sequence[str] | None) -> Any:
    import datasets

    if files:
        return _json_lines([str(folder / name) for name in files])
    # Without the data card nothing names the configurations, but by custom each has its own folder.
    if config and (folder / config).is_dir() and not (folder / "README.md").exists():
        return datasets.load_dataset(str(folder), data_dir=config, split=split)
    return datasets.load_dataset(str(folder), config, split=split)


def _from_hub(
    hub_id: str, config: str | None, split: str, revision: str | None, files: Sequence[str] | None
) -> tuple[Any, str | None]:
    import datasets
    from huggingface_hub import hf_hub_download

    resolved = _resolve(hub_id, revision)
    if files:
        paths = [hf_hub_download(hub_id, name, repo_type="dataset", revision=revision) for name in files]
        return _json_lines(paths), resolved or _commit_in(paths[0])
    rows = datasets.load_dataset(hub_id, config, split=split, revision=resolved or revision)
    found = resolved or _commit_in(rows.cache_files[0]["filename"])
    # Offline, the library takes the newest revision it has, whatever was asked for.
    if revision and _COMMIT.fullmatch(revision) and found != revision:
        raise UserError(f"the cache holds {hub_id} at {found}, not at revision {revision}: go online once")
    return rows, found


def _resolve(hub_id: str, revision: str | None) -> str | None:
    """The commit hash behind `revision` (default branch if None); None in offline mode."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(hub_id, revision=revision, timeout=_RESOLVE_SECONDS).sha
    except HfHubHTTPError as error:
        raise UserError(
            f"the hub refuses the data set {hub_id}, revision {revision or 'default'}: {_first_line(error)}"
        ) from error
    # The transport's exceptions belong to whichever HTTP library the installed huggingface_hub was built on.
    except Exception as error:
        raise UserError(
            f"the hub at {constants.ENDPOINT} cannot be reached for {hub_id} "
            f"({type(error).__name__}: {_first_line(error)}): {_ADVICE}"
        ) from error


def _json_lines(paths: list[str]) -> Any:
    import datasets

    return datasets.load_dataset("json", data_files=paths, split="train")


def _commit_in(path: str) -> str | None:
    match = _COMMIT.search(path)
    return match[0] if match else None


def _datasets_error() -> type[Exception]:
    from datasets.exceptions import DatasetsError

    return DatasetsError


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
