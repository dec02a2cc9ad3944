"""The command as a whole: accounting, exit codes, and runs that are killed and resumed."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dloop.cli import UserError
from dloop.regenerate import Options, main
from dloop.regeneration.ledger import paths
from tests.regeneration.stub_server import GARBAGE, StubServer
from tests.regeneration.tiny_target import save_target

LINES = 40


@pytest.fixture
def prompts(tmp_path):
    """Forty rows with one to three questions; one is no row, one cannot be asked."""
    path = tmp_path / "prompts.jsonl"
    with open(path, "w") as file:
        for n in range(LINES):
            turns = [{"from": "human", "value": f"question {n}.{turn}"} for turn in range(1 + n % 3)]
            answers = [{"from": "gpt", "value": "old"}] * len(turns)
            conversation = [turn for pair in zip(turns, answers, strict=True) for turn in pair]
            row = {"id": str(n), "conversations": conversation[1:] if n == 9 else conversation}
            file.write("{broken\n" if n == 5 else json.dumps(row) + "\n")
    return path


@pytest.fixture
def command(prompts, tmp_path, monkeypatch):
    """Run the command line in this process; returns its exit code."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["regenerate", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return stop.code
        return 0

    return run


def flags(prompts, output, **more):
    """Arguments of a run in this process, or with `server_address` on servers."""
    values = {"model": "m", "input_file_path": prompts, "output_file_path": output, **more}
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def rows(output):
    """All rows of a run, by line; none twice."""
    found = [json.loads(line) for path in paths(output).values() for line in path.read_bytes().splitlines()]
    by_line = {row["line"]: row for row in found}
    assert len(by_line) == len(found)
    return dict(sorted(by_line.items()))


def test_answers_of_servers_with_accounting(command, prompts, tmp_path, capsys):
    def behave(body, number):
        if body["messages"][-1]["content"] == "question 3.0":
            return {"content": "a b c d e f", "finish_reason": "length"}
        return None

    output, stats = tmp_path / "out.jsonl", tmp_path / "stats.json"
    with StubServer(behave) as one, StubServer(behave) as two:
        arguments = flags(prompts, output, stats=stats, concurrency=3, temperature=1.0, top_p=0.9, top_k=64)
        assert command(*arguments, "--server-address", one.address, two.address) == 0
    assert list(rows(output)) == list(range(LINES))
    assert {line: row["error"] for line, row in rows(output).items() if row["status"] != "success"} == {
        5: "not_json",
        9: "starts_with_assistant",
    }
    body = (one.questions + two.questions)[0]
    assert (body["model"], body["temperature"], body["top_p"], body["top_k"]) == ("m", 1.0, 0.9, 64)
    assert (body["max_tokens"], body["chat_template_kwargs"]) == (4096, {"enable_thinking": False})
    numbers = json.loads(stats.read_text())
    assert {name: numbers[name] for name in ("rows", "success", "error", "skipped")} == {
        "rows": 40,
        "success": 38,
        "error": 0,
        "skipped": 2,
    }
    answers = sum(1 + n % 3 for n in range(LINES) if n not in (5, 9))
    assert numbers["answers"] == answers
    assert (numbers["truncated_answers"], numbers["max_answer_words"]) == (1, 6)
    assert "40 rows = 38 success + 0 error + 2 skipped" in capsys.readouterr().out


def test_too_many_error_rows_give_exit_code_one_and_can_be_retried(command, prompts, tmp_path, capsys):
    output, bad = tmp_path / "out.jsonl", {"question 7.0", "question 8.1"}
    with StubServer(lambda body, number: 400 if body["messages"][-1]["content"] in bad else None) as stub:
        arguments = [*flags(prompts, output), "--server-address", stub.address]
        assert command(*arguments) == 1
        assert [row["line"] for row in rows(output).values() if row["status"] == "error"] == [7, 8]
        asked = len(stub.questions)
        bad.clear()
        assert command(*arguments, "--resume") == 0
        # Only the failed rows are asked again, from their first question on.
        assert len(stub.questions) - asked == sum(1 + n % 3 for n in (7, 8))
    assert {row["status"] for row in rows(output).values()} == {"success", "skipped"}
    capsys.readouterr()


def kill_at_request(numbers, prompts, output):
    """Run the command on a server that kills it at request number n, once for each n, then to its end."""
    process = None

    def behave(body, number):
        if limits and number == limits[0]:
            limits.pop(0)
            process.send_signal(signal.SIGKILL)

    limits = list(numbers)
    with StubServer(behave) as stub:
        arguments = [*flags(prompts, output, concurrency=4), "--server-address", stub.address, "--resume"]
        # A proxy in the environment must not come between the command and a server on this machine.
        env = os.environ | {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
        codes = []
        while not codes or codes[-1] == -signal.SIGKILL:
            process = subprocess.Popen([sys.executable, "-m", "dloop.regenerate", *arguments], env=env)
            codes.append(process.wait(timeout=60))
    return codes


def test_a_run_on_servers_that_is_killed_twice_ends_with_the_rows_of_an_undisturbed_one(command, prompts, tmp_path):
    with StubServer() as stub:
        assert command(*flags(prompts, tmp_path / "calm.jsonl"), "--server-address", stub.address) == 0
    codes = kill_at_request([17, 49], prompts, tmp_path / "killed.jsonl")
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert rows(tmp_path / "killed.jsonl") == rows(tmp_path / "calm.jsonl")


def test_three_bad_servers_a_kill_and_two_resumes_leave_each_line_in_one_file(command, prompts, tmp_path):
    """One server is slow, one dies in the middle, one answers garbage after its first answers."""
    process, output = None, tmp_path / "out.jsonl"

    def hesitate(body, number):
        if number == 30:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.02)

    def die(body, number):
        dies.dead = number > 6

    with (
        StubServer(hesitate) as slow,
        StubServer(die) as dies,
        StubServer(lambda body, number: (GARBAGE,) if number > 4 else None) as raves,
    ):
        line = [*flags(prompts, output, concurrency=2), "--resume", "--server-address"]
        line += [server.address for server in (slow, dies, raves)]
        process = subprocess.Popen([sys.executable, "-m", "dloop.regenerate", *line])
        assert process.wait(timeout=120) == -signal.SIGKILL
        finished = len(rows(output))
        assert 0 < finished < LINES
        assert command(*line) == 0
        again = len(slow.questions)
        assert command(*line) == 0
        assert len(slow.questions) == again, "the second resume finds nothing to do"
    assert dies.dead
    assert list(rows(output)) == list(range(LINES))
    assert [line for line, row in rows(output).items() if row["status"] != "success"] == [5, 9]
    for line, row in rows(output).items():
        if row["status"] == "success":
            answers = [turn["content"] for turn in row["conversations"] if turn["role"] == "assistant"]
            assert answers == [f"answer {turn + 1} to question {line}.{turn}" for turn in range(1 + line % 3)]


MEASURE_MEMORY = """
import asyncio, sys
from pathlib import Path
from dloop.regenerate import Options, open_dialogues, settings
from dloop.regeneration.dialogue import Answer
from dloop.regeneration.dispatch import Dispatcher
from dloop.regeneration.ledger import Ledger
from dloop.regeneration.selection import select
from dloop.regeneration.servers import Patience

class Instant:
    suspended, failed_probes, problem, address = False, 0, "", "here"
    async def probe(self): pass
    async def close(self): pass
    async def answer(self, messages):
        await asyncio.sleep(0)
        return Answer("word " * 20, None, "stop")

source, output = map(Path, sys.argv[1:])
options = Options(model="m", input_file_path=source, output_file_path=output, server_address=("here",))
selection = select(source)
ledger = Ledger(output, selection, settings(options, selection))
with ledger:
    dialogues = open_dialogues(options, selection, ledger, print)
    work = Dispatcher([Instant()], dialogues, lambda outcome: ledger.write([outcome]), Patience())
    asyncio.run(work.run(64))
ledger.tally.check(selection.count)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
MEGABYTES_OF_GROWTH = 8
"""The rows take two hundred; what is held is a byte or two a row."""


@pytest.mark.slow
def test_memory_is_flat_over_two_hundred_thousand_rows(tmp_path):
    peaks = []
    for count in (2_000, 200_000):
        source = tmp_path / f"{count}.jsonl"
        row = json.dumps({"conversations": [{"from": "human", "value": "why " * 200}]}) + "\n"
        with open(source, "w") as file:
            file.writelines(itertools.repeat(row, count))
        line = [sys.executable, "-c", MEASURE_MEMORY, source, tmp_path / f"out_{count}.jsonl"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < MEGABYTES_OF_GROWTH, peaks


DIE_WHILE_WRITING = """
import os, signal, sys
from dloop.regeneration import ledger
from dloop.regenerate import main
writes, after, share = 0, int(sys.argv.pop(1)), float(sys.argv.pop(1))
whole = ledger._write_all
def torn(file, data):
    global writes
    writes += bool(data)
    if writes < after or not data:
        return whole(file, data)
    whole(file, data[: int(share * len(data))])
    os.kill(os.getpid(), signal.SIGKILL)
ledger._write_all = torn
main()
"""


def test_a_run_in_this_process_that_is_killed_while_writing_ends_with_the_same_rows(command, prompts, tmp_path):
    target = save_target(tmp_path / "target")
    settings = {"model": target, "batch_size": 8, "max_tokens": 12, "top_k": 40, "seed": 3, "device": "cpu"}
    assert command(*flags(prompts, tmp_path / "calm.jsonl", **settings)) == 0
    killed = flags(prompts, tmp_path / "killed.jsonl", **settings)
    for after, share in ((2, 0.6), (1, 0.3)):
        line = [sys.executable, "-c", DIE_WHILE_WRITING, str(after), str(share), *killed, "--resume"]
        assert subprocess.run(line, capture_output=True, timeout=120).returncode == -signal.SIGKILL
        contents = [path.read_bytes() for path in paths(tmp_path / "killed.jsonl").values()]
        assert any(content and not content.endswith(b"\n") for content in contents)
    assert command(*killed, "--resume") == 0
    calm = rows(tmp_path / "calm.jsonl")
    assert rows(tmp_path / "killed.jsonl") == calm
    assert sum(row["status"] == "success" for row in calm.values()) > LINES // 2

    # The target was trained again under the same name: its answers must not be mixed with the old ones.
    os.utime(target / "model.safetensors", (0, 0))
    with pytest.raises(UserError, match=r"other settings.*weights"):
        command(*killed, "--resume")

    # Shards are answered in batches of their own; merged they hold every line once.
    shards = [tmp_path / f"{i}.jsonl" for i in (1, 2)]
    for index, shard in enumerate(shards):
        command(*flags(prompts, shard, **settings), "--shard", f"{index + 1}-of-2")
    merged = ["--merge", *shards, "--output-file-path", tmp_path / "all.jsonl", "--stats", tmp_path / "stats.json"]
    assert command(*merged, "--input-file-path", prompts) == 0
    assert list(rows(tmp_path / "all.jsonl")) == list(range(LINES))
    assert json.loads((tmp_path / "stats.json").read_text())["rows"] == LINES


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": None}, "--model and --input-file-path"),
        ({"temperature": 1.5}, "--temperature is 1.5"),
        ({"top_p": 0.0}, "--top-p"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"batch_size": -1}, "--batch-size is -1"),
        ({"reasoning": "none"}, "--reasoning none"),
    ],
)
def test_values_that_cannot_be(wrong, message, tmp_path):
    values = {"model": "m", "input_file_path": tmp_path, "output_file_path": tmp_path} | wrong
    with pytest.raises(UserError, match=message):
        Options(**values).check()
    Options(output_file_path=tmp_path, merge=(tmp_path,)).check()
