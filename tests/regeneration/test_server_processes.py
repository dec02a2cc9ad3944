"""Servers of one's own: started one a GPU, awaited, and gone afterwards with all they started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dloop.cli import UserError
from dloop.regeneration.server_processes import ServerCommand, ServerProcesses, free_ports, gpus_for

STAND_IN = f"{sys.executable} -m tests.regeneration.own_server {{model}} {{port}}"


@pytest.fixture(autouse=True)
def from_the_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def command(notes, *more, **options):
    return ServerCommand(model="m", template=" ".join([STAND_IN, str(notes), *more]), **options)


def facts(notes):
    """What every server noted, in the order they were started."""
    found = [json.loads(file.read_text()) for file in notes.glob("gpu_*.json")]
    return sorted(found, key=lambda fact: fact["gpu"])


def alive(pids):
    """Those of `pids` that still run; a zombie does not."""
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid for pid, stat in states.items() if stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    ]


def wait_until_gone(pids):
    deadline = time.monotonic() + 30
    while alive(pids):
        assert time.monotonic() < deadline, "a server outlived its run"
        time.sleep(0.05)


def test_each_server_has_a_gpu_and_is_ready_and_all_end_with_the_body(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    with ServerProcesses(command(tmp_path, revision="r"), 2, tmp_path / "log" / "server") as servers:
        first, second = facts(tmp_path)
        assert [first["gpu"], second["gpu"]] == ["5", "7"]
        assert first["model"] == "m"
        assert first["more"] == ["--revision", "r"]
        assert len(set(servers.addresses)) == 2
        assert len(alive(first["pids"] + second["pids"])) == 4
    wait_until_gone(first["pids"] + second["pids"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_error_in_the_body_ends_them_too(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        ServerProcesses(command(tmp_path), 1, tmp_path / "server"),
    ):
        raise ZeroDivisionError
    wait_until_gone(facts(tmp_path)[0]["pids"])


def test_one_that_fails_at_the_start_is_told_with_its_last_words_and_takes_the_others_along(tmp_path):
    with (
        pytest.raises(UserError, match=r"ended with code 1 before it was ready:\nno such device"),
        ServerProcesses(command(tmp_path, "--fail"), 2, tmp_path / "server"),
    ):
        pass


def test_one_that_is_never_ready_is_given_up(tmp_path):
    with (
        pytest.raises(UserError, match="not ready after 1 s"),
        ServerProcesses(command(tmp_path, "--hang", seconds_to_start=1), 1, tmp_path / "server"),
    ):
        pass
    wait_until_gone(facts(tmp_path)[0]["pids"])


def test_a_command_that_does_not_exist_is_told(tmp_path):
    missing = ServerCommand(model="m", template="no-such-program {model} {port}")
    with pytest.raises(UserError, match="cannot be started"), ServerProcesses(missing, 1, tmp_path / "server"):
        pass


@pytest.mark.parametrize("template", ["serve {model}", "serve {port}", "serve {model} {port} {host}", "serve 'x"])
def test_a_template_must_say_where_model_and_port_go(template):
    with pytest.raises(UserError, match="server command"):
        ServerCommand(model="m", template=template).words(1)


def test_the_default_is_sglang_as_the_paper_ran_it():
    words = ServerCommand(model="Qwen/Qwen3-4B").words(30000)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert {"--mem-fraction-static": "0.8", "--dtype": "bfloat16"}.items() <= dict(
        zip(words[3::2], words[4::2], strict=True)
    ).items()


def test_gpus_are_those_of_the_job():
    assert gpus_for(2, None) == ["0", "1"]
    assert gpus_for(1, "3,4") == ["3"]
    assert gpus_for(2, "") == ["", ""], "a machine without GPUs"
    with pytest.raises(UserError, match="3 servers"):
        gpus_for(3, "0,1")
    assert len(set(free_ports(8))) == 8


def run_stage(tmp_path, *more):
    """The stage on two servers of its own, in the background."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "conversations": [{"from": "human", "value": f"q{n}"}]} for n in range(20)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", "m", "--input-file-path", prompts, "--output-file-path", tmp_path / "out.jsonl"]
    words += ["--launch-servers", "2", "--server-command", f"{STAND_IN} {tmp_path} {' '.join(more)}"]
    return subprocess.Popen(
        [sys.executable, "-m", "dloop.regenerate", *map(str, words)],
        stderr=subprocess.PIPE,
        # Whoever starts the tests in the background makes their children deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_the_stage_answers_on_servers_of_its_own(tmp_path):
    process = run_stage(tmp_path)
    assert process.wait(60) == 0, process.stderr.read().decode()
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["line"] for row in rows) == list(range(20))
    assert {fact["gpu"] for fact in facts(tmp_path)} == {"0", "1"}
    wait_until_gone([pid for fact in facts(tmp_path) for pid in fact["pids"]])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_stage_ends_its_servers(number, tmp_path):
    process = run_stage(tmp_path, "--hang")
    deadline = time.monotonic() + 60
    while len(facts(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    code = process.wait(60)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]
    # Of a stage that was killed, the servers hear; what they started is theirs to end.
    own = slice(1) if number == signal.SIGKILL else slice(None)
    wait_until_gone([pid for fact in facts(tmp_path) for pid in fact["pids"][own]])
    for fact in facts(tmp_path):
        for pid in alive(fact["pids"]):
            os.kill(pid, signal.SIGKILL)
