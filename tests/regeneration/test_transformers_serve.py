"""Against a server that is not ours: transformers' own, on a tiny target, launched by the stage itself."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.regeneration.tiny_target import save_target

missing = [name for name in ("accelerate", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: pip install 'transformers[serving]'"),
]
SERVE = "-m transformers.cli.transformers serve {model} --device cpu --host 127.0.0.1 --port {port}"
LINES = 6


def regenerate(tmp_path, target, *more):
    rows = [{"id": str(n), "conversations": [{"from": "human", "value": f"question {n}"}]} for n in range(LINES)]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", target, "--input-file-path", source, "--output-file-path", tmp_path / "out.jsonl"]
    words += ["--launch-servers", 1, "--server-command", f"{sys.executable} {SERVE}", "--max-tokens", 8, *more]
    return subprocess.run(
        [sys.executable, "-m", "dloop.regenerate", *map(str, words)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def target(tmp_path):
    folder = save_target(tmp_path / "target")
    settings = folder / "generation_config.json"
    # Without it this server answers greedily, whatever temperature it is sent.
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": True}))
    return folder


def test_a_real_server_answers_every_row(tmp_path, target):
    done = regenerate(tmp_path, target, "--top-p", "0.8", "--resume")
    ended = [json.loads(line) for file in tmp_path.glob("out*.jsonl") for line in file.read_text().splitlines()]
    assert sorted(row["line"] for row in ended) == list(range(LINES)), done.stderr
    answered = [row for row in ended if row["status"] == "success"]
    assert answered, ended
    assert all(row["conversations"][-1]["content"].strip() for row in answered)


def test_a_server_that_knows_no_top_k_stops_the_run_with_its_own_words(tmp_path, target):
    done = regenerate(tmp_path, target, "--top-k", "20")
    assert done.returncode == 2
    assert "a server refuses the form of the requests" in done.stderr
    assert "top_k" in done.stderr
    assert "HTTP 422" in done.stderr
