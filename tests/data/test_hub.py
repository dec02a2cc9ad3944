"""Hub access with the real client libraries, against a hub on loopback and a mirror on disk."""

import json
import os
import socket
import subprocess
import sys

import pytest

from dloop.cli import UserError
from dloop.data.hub import load_hub_rows
from tests.data.hub_server import COMMIT, serve

CARD = """---
configs:
- config_name: main
  data_files:
  - split: test
    path: main/test-*
- config_name: other
  data_files:
  - split: test
    path: other/test-*
---
"""

ASK = """
import json, sys
from dloop.cli import UserError
from dloop.data.hub import load_hub_rows
for arguments in json.loads(sys.argv[1]):
    try:
        rows, revision = load_hub_rows(**arguments)
        print(json.dumps([[dict(row) for row in rows], revision]))
    except UserError as error:
        print(json.dumps(["error", str(error)]))
"""

PARQUET = {"hub_id": "owner/maths", "config": "main", "split": "test"}
LINES = {"hub_id": "owner/code", "split": "test", "files": ["test2.jsonl", "test.jsonl"]}
QUESTIONS = [{"question": "m0"}, {"question": "m1"}, {"question": "m2"}]
PROGRAMS = [{"n": 3}, {"n": 1}, {"n": 2}]


@pytest.fixture
def repositories(tmp_path):
    from datasets import Dataset

    root = tmp_path / "repositories"
    for config in ("main", "other"):
        folder = root / "owner" / "maths" / config
        folder.mkdir(parents=True)
        rows = [{"question": f"{config[0]}{i}"} for i in range(3)]
        Dataset.from_list(rows).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    (root / "owner" / "maths" / "README.md").write_text(CARD)
    code = root / "owner" / "code"
    code.mkdir()
    (code / "test.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (code / "test2.jsonl").write_text('{"n": 3}\n')
    (code / "code.py").write_text("raise SystemExit('a loading script must not run')")
    return root


def ask(tmp_path, requests, **environment):
    """Answers of a fresh process: the libraries read their environment when they are imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "DLOOP_"))}
    env |= {"HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"} | environment
    command = [sys.executable, "-c", ASK, json.dumps(requests)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rows_and_resolved_revision_come_from_the_hub_then_from_its_cache(tmp_path, repositories):
    unknown = PARQUET | {"revision": "v9"}
    with serve(repositories) as endpoint:
        online = ask(tmp_path, [PARQUET, LINES, unknown], HF_ENDPOINT=endpoint)
    assert online[:2] == [[QUESTIONS, COMMIT], [PROGRAMS, COMMIT]]
    assert "refuses" in online[2][1]
    assert "v9" in online[2][1]

    other_commit = PARQUET | {"revision": "f" * 40}
    offline = ask(tmp_path, [PARQUET, LINES, other_commit], HF_HUB_OFFLINE="1")
    assert offline[:2] == [[QUESTIONS, COMMIT], [PROGRAMS, COMMIT]]
    assert "at revision ffff" in offline[2][1]


def test_an_unreachable_hub_is_reported_at_once_with_advice(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        [[_, message]] = ask(tmp_path, [PARQUET], HF_ENDPOINT=endpoint)
    assert endpoint in message
    assert "cannot be reached" in message
    assert "DLOOP_HUB_MIRROR" in message


def test_a_mirror_replaces_the_hub(repositories, monkeypatch, tmp_path):
    monkeypatch.setenv("DLOOP_HUB_MIRROR", str(repositories))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows, revision = load_hub_rows(**PARQUET)
    assert [dict(row) for row in rows] == QUESTIONS
    assert revision is None
    assert [dict(row) for row in load_hub_rows(**LINES)[0]] == PROGRAMS
    (repositories / "owner" / "maths" / "README.md").unlink()
    rows, _ = load_hub_rows(**PARQUET | {"config": "other"})
    assert rows[0] == {"question": "o0"}


def test_what_a_mirror_lacks_is_named(repositories, monkeypatch, tmp_path):
    monkeypatch.setenv("DLOOP_HUB_MIRROR", str(repositories))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(UserError, match="holds no owner/absent/"):
        load_hub_rows("owner/absent", split="test")
    with pytest.raises(UserError, match=r"owner/maths .*validation"):
        load_hub_rows(**PARQUET | {"split": "validation"})
    with pytest.raises(UserError, match=r"test3\.jsonl"):
        load_hub_rows(**LINES | {"files": ["test3.jsonl"]})
