"""One queue for several servers: order of work, dying and reviving servers, and when a run must stop."""

import asyncio
import json
import threading
from collections import Counter

import pytest

from dloop.cli import UserError
from dloop.regeneration.dialogue import open_dialogue
from dloop.regeneration.dispatch import REFUSALS_AT_START, Dispatcher
from dloop.regeneration.servers import Patience, RequestForm, Server
from tests.regeneration.stub_server import CUT, StubServer

FORM = RequestForm(model="m", max_tokens=100, temperature=0.7)
HASTE = Patience(first_pause=0, longest_pause=0, probe_interval=0.01)


def dialogues(count, turns=1):
    for line in range(count):
        messages = []
        for turn in range(turns):
            messages += [{"role": "user", "content": f"q{line}.{turn}"}, {"role": "assistant", "content": "old"}]
        yield open_dialogue(line, json.dumps({"conversations": messages}).encode(), "disable")


def dispatch(stubs, rows, *, concurrency=2, patience=HASTE, said=None):
    """Outcomes by line; fails if a line has two."""
    outcomes = []
    said = [] if said is None else said

    async def run():
        servers = [Server(getattr(stub, "address", stub), FORM, patience, concurrency) for stub in stubs]
        await Dispatcher(servers, rows, outcomes.append, patience, said.append).run(concurrency)

    asyncio.run(asyncio.wait_for(run(), 60))
    by_line = {outcome.line: outcome for outcome in outcomes}
    assert len(by_line) == len(outcomes)
    return by_line


def assert_complete(outcomes, count, turns=1):
    assert sorted(outcomes) == list(range(count))
    for line, outcome in outcomes.items():
        assert outcome.status == "success", outcome.row
        contents = [turn["content"] for turn in outcome.row["conversations"]]
        questions = [f"q{line}.{turn}" for turn in range(turns)]
        answers = [f"answer {turn + 1} to {question}" for turn, question in enumerate(questions)]
        assert contents == [text for pair in zip(questions, answers, strict=True) for text in pair]


def test_every_row_gets_all_its_answers_in_order():
    with StubServer() as stub:
        assert_complete(dispatch([stub], dialogues(7, turns=3)), 7, turns=3)
    assert stub.bodies[0]["max_tokens"] == 1
    histories = [[turn["content"] for turn in body["messages"]] for body in stub.questions]
    assert all(
        history[1::2] == [f"answer {k + 1} to {q}" for k, q in enumerate(history[:-1:2])] for history in histories
    )


def test_no_more_rows_are_read_than_requests_are_under_way():
    """While both slots hang on the first two rows, the third is not taken from the source."""
    taken, release = [], threading.Event()

    def source():
        for dialogue in dialogues(6):
            taken.append(dialogue.line)
            yield dialogue

    def behave(body, number):
        if number == 2:
            assert taken == [0, 1]
            release.set()
        release.wait(30)

    with StubServer(behave) as stub:
        assert_complete(dispatch([stub], source()), 6)


def test_a_slow_server_does_not_hold_up_the_others():
    """The first server answers its only row last; nothing else waits for it."""
    release, fast_done = threading.Event(), Counter()

    def fast(body, number):
        fast_done["rows"] += 1
        if fast_done["rows"] == 9:
            release.set()

    with StubServer(lambda body, number: release.wait(30) and None) as slow, StubServer(fast) as quick:
        assert_complete(dispatch([slow, quick], dialogues(10), concurrency=1), 10)
    assert (len(slow.questions), len(quick.questions)) == (1, 9)


def test_rows_of_a_server_that_dies_go_to_the_others_with_the_turns_they_have():
    def die(body, number):
        if number == 12:
            dying.dead = True

    with StubServer(die) as dying, StubServer() as second, StubServer() as third:
        said = []
        outcomes = dispatch([dying, second, third], dialogues(60, turns=2), concurrency=4, said=said)
    assert_complete(outcomes, 60, turns=2)
    assert any("suspended" in line and dying.address in line for line in said)


def test_a_server_that_comes_back_works_again():
    state = Counter()

    def flicker(body, number):
        state["seen"] += 1
        return (CUT,) if 3 <= state["seen"] < 12 else None

    with StubServer(flicker) as stub:
        said = []
        outcomes = dispatch([stub], dialogues(20), concurrency=5, said=said)
    assert_complete(outcomes, 20)
    assert any("up again" in line for line in said)


def test_when_all_servers_are_down_the_run_stops_with_the_rows_it_has():
    def die(body, number):
        if number == 5:
            stub.dead = True

    outcomes = []

    async def run():
        server = Server(stub.address, FORM, HASTE, 2)
        await Dispatcher([server], dialogues(50), outcomes.append, HASTE, lambda _: None).run(2)

    with StubServer(die) as stub, pytest.raises(UserError, match="--resume"):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert {outcome.status for outcome in outcomes} == {"success"}
    assert len(outcomes) in (3, 4)


def test_a_server_missing_at_the_start_is_left_out_and_none_is_an_error():
    with StubServer() as stub:
        assert_complete(dispatch(["127.0.0.1:9", stub], dialogues(5)), 5)
    with pytest.raises(UserError, match="no server answers"):
        dispatch(["127.0.0.1:9", "127.0.0.1:9"], dialogues(5))


def test_a_row_that_is_refused_or_never_answered_is_an_error_row():
    def behave(body, number):
        return {"q1.0": 400, "q2.0": 500, "q3.0": (CUT,)}.get(body["messages"][-1]["content"])

    with StubServer(behave) as stub:
        outcomes = dispatch([stub], dialogues(5), concurrency=1)
    assert [outcomes[line].status for line in range(5)] == ["success", "error", "error", "error", "success"]
    assert "HTTP 400" in outcomes[1].row["error"]
    assert outcomes[1].row["conversations"] == [
        {"role": "user", "content": "q1.0"},
        {"role": "assistant", "content": "old"},
    ]


def test_a_row_that_kills_every_server_it_meets_ends_as_an_error_row():
    def behave(body, number):
        return (CUT,) if body["messages"][-1]["content"] == "q0.0" else None

    patience = Patience(first_pause=0, longest_pause=0, probe_interval=0.01, lost_before_suspension=1)
    with StubServer(behave) as one, StubServer(behave) as two:
        outcomes = dispatch([one, two], dialogues(10), concurrency=1, patience=patience)
    assert outcomes.pop(0).status == "error"
    assert {outcome.status for outcome in outcomes.values()} == {"success"}


def test_thinking_answers_are_skipped():
    with StubServer(lambda body, number: "<think>\nhm\n</think>\n\n4" if number == 1 else None) as stub:
        outcomes = dispatch([stub], dialogues(2), concurrency=1)
    assert (outcomes[0].status, outcomes[0].row["error"]) == ("skipped", "think_marker")
    assert outcomes[0].row["answer"].endswith("4")


@pytest.mark.parametrize("status", [404, 422])
def test_a_form_that_no_row_can_have_stops_the_run(status):
    """At the first probe, and also where only real rows are refused."""
    with StubServer(lambda body, number: status) as stub, pytest.raises(UserError, match=f"HTTP {status}"):
        dispatch([stub], dialogues(100))
    assert REFUSALS_AT_START <= len(stub.questions) < 2 * REFUSALS_AT_START


def test_a_form_refused_by_the_probe_stops_before_any_row():
    stub = StubServer(lambda body, number: 422)
    stub.refuse_probes = True
    with stub, pytest.raises(UserError, match="form of the requests"):
        dispatch([stub], dialogues(5))
    assert stub.questions == []


def test_a_failure_of_the_bookkeeping_stops_the_run():
    def full(outcome):
        raise OSError("disk full")

    async def run():
        await Dispatcher([Server(stub.address, FORM, HASTE, 2)], dialogues(5), full, HASTE).run(2)

    with StubServer() as stub, pytest.raises(OSError, match="disk full"):
        asyncio.run(run())
