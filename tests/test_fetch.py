"""Downloading what a configuration names, from a hub on loopback that breaks off."""

import os
import subprocess
import sys

import pytest
import yaml

from dloop.config import Configuration
from dloop.fetch import damaged
from tests.data.hub_server import COMMIT, serve
from tests.test_config import SCHEMA, load


@pytest.fixture
def repositories(tmp_path):
    root = tmp_path / "repositories"
    for name in ("owner/target", "owner/released", "owner/published"):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        repeats = 2_000_000 if name == "owner/target" else 5  # the library writes blocks of ten megabytes
        (folder / "model.safetensors").write_bytes(name.encode() * repeats)
        (folder / "modeling.py").write_text("raise SystemExit('code of a repository is not wanted')")
    (root / "owner/code").mkdir()
    return root


@pytest.fixture
def configuration(tmp_path):
    """The paper's configuration with one target and drafts of the hub on loopback, and data in files."""
    values = load("config.yaml")
    values["targets"] = {"t": values["targets"]["qwen3-4b"] | {"model": "owner/target", "revision": COMMIT}}
    drafts = {"released": "owner/released", "published": f"owner/published@{COMMIT}"}
    values["hosts"] = {"dflash": values["hosts"]["dflash"] | {"drafts": {"t": drafts}}}
    values["settings"] = {"dflash": values["settings"]["dflash"]}
    values["prompts"] = {"dataset": "own", "flags": {"data_path": "own.jsonl"}}
    values["benchmarks"] = {"own": {"file": "own.jsonl"}}
    values["hub"] = {"cache": str(tmp_path / "cache"), "offline": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def fetch(configuration, endpoint):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "DLOOP_"))}
    environment = kept | {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "dloop.fetch", configuration]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_everything_is_downloaded_through_cuts_and_checked(repositories, configuration, tmp_path):
    resumed = []
    with serve(repositories, cut_once=["model.safetensors"], resumed=resumed) as endpoint:
        done = fetch(configuration, endpoint)
        assert done.returncode == 0, done.stderr
        assert resumed == ["model.safetensors"], "the rest of the file that was cut is asked for, and no more"
        kept = sorted((tmp_path / "cache/hub").glob("models--*/snapshots/*"))
        assert [folder.parts[-3:] for folder in kept] == [
            (f"models--owner--{name}", "snapshots", COMMIT) for name in ("published", "released", "target")
        ]
        for folder in kept:
            name = folder.parts[-3].removeprefix("models--").replace("--", "/")
            assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
            original = (repositories / name / "model.safetensors").read_bytes()
            assert (folder / "model.safetensors").read_bytes() == original
            assert list(damaged(folder)) == []

        weights = kept[2] / "model.safetensors"
        weights.resolve().write_bytes(b"x" + weights.read_bytes()[1:])
        assert list(damaged(kept[2])) == [weights]
        again = fetch(configuration, endpoint)
        assert again.returncode == 2
        assert "is not what the hub announced" in again.stderr


def test_what_cannot_be_had_is_named(repositories, configuration):
    (repositories / "owner/released").rename(repositories / "owner/other")
    with serve(repositories) as endpoint:
        done = fetch(configuration, endpoint)
    assert done.returncode == 2
    assert "error: owner/released at its newest revision cannot be downloaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_revisions_and_caches_reach_the_jobs(configuration, tmp_path):
    values = yaml.safe_load(configuration.read_text())
    plan = Configuration(values, SCHEMA)
    assert plan.repositories() == [("owner/target", COMMIT), ("owner/released", None), ("owner/published", COMMIT)]
    flags = plan.evaluation_flags("t", "dflash", "dloop", "published")
    assert (flags["draft_model"], flags["draft_revision"]) == ("owner/published", COMMIT)
    assert "draft_revision" not in plan.evaluation_flags("t", "dflash", "released", "released")
    assert plan.hub_environment() == {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    del values["hub"]
    assert Configuration(values, SCHEMA).hub_environment() == {}
    values["hosts"]["dflash"]["drafts"]["t"]["released"] = f"owner/released@{COMMIT}"
    start = Configuration(values, SCHEMA).training_flags("t", "dflash", "trained")
    assert (start["draft_init_path"], start["draft_revision"]) == ("owner/released", COMMIT)


def test_a_configuration_is_demanded(monkeypatch, capsys):
    from dloop import fetch

    monkeypatch.setattr(sys, "argv", ["fetch"])
    with pytest.raises(SystemExit) as stop:
        fetch.main()
    assert stop.value.code == 2
    assert "CONFIGURATION" in capsys.readouterr().err.upper()
