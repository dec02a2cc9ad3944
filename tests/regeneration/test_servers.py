"""One server: what is sent, which failures are tried again, and what they mean in the end."""

import asyncio
import socket
import threading

import pytest

from dloop.regeneration.servers import Lost, Patience, Refused, RequestForm, Server, Unwell
from tests.regeneration.stub_server import CUT, GARBAGE, HTML, StubServer

FORM = RequestForm(model="m", max_tokens=100, temperature=0.7)
HASTE = Patience(first_pause=0, longest_pause=0, lost_before_suspension=99)
HELLO = [{"role": "user", "content": "Hello"}]


def ask(address, form=FORM, patience=HASTE, times=1, messages=HELLO):
    """Answers, or the failure, of so many requests one after the other, and the server."""

    async def run():
        server, results = Server(address, form, patience, concurrency=2), []
        for _ in range(times):
            try:
                results.append(await server.answer(messages))
            except (Lost, Unwell, Refused) as error:
                results.append(error)
        await server.close()
        return results, server

    return asyncio.run(run())


def test_a_request_holds_what_is_set_and_nothing_else():
    with StubServer() as stub:
        form = RequestForm(model="m", max_tokens=9, temperature=1.0, top_p=0.95, top_k=64, reasoning="save")
        [[answer], _] = ask(stub.address, form)
        ask(f"http://{stub.address}/v1/", RequestForm(model="m", max_tokens=9, temperature=0.0, reasoning="none"))
    assert (answer.text, answer.reasoning, answer.finish) == ("answer 1 to Hello", None, "stop")
    assert stub.bodies[0] == {
        "model": "m",
        "messages": HELLO,
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 64,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert stub.bodies[1] == {"model": "m", "messages": HELLO, "max_tokens": 9, "temperature": 0.0}


def test_thinking_is_disabled_unless_told_otherwise_and_answers_are_read_whole():
    reply = {"content": "4", "reasoning_content": "two and two", "finish_reason": "length"}
    with StubServer(lambda body, number: dict(reply)) as stub:
        [[answer], _] = ask(stub.address)
    assert (answer.text, answer.reasoning, answer.finish) == ("4", "two and two", "length")
    assert stub.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_an_answer_without_text_is_an_answer():
    with StubServer(lambda body, number: {"content": None}) as stub:
        [[answer], _] = ask(stub.address)
    assert answer.text is None


@pytest.mark.parametrize("trouble", [429, 500, 503, (CUT,), (GARBAGE,), (HTML,)])
def test_trouble_that_may_pass_is_tried_three_times_more(trouble):
    with StubServer(lambda body, number: trouble if number < 4 else None) as stub:
        [[answer], _] = ask(stub.address)
    assert answer.text == "answer 1 to Hello"
    assert len(stub.bodies) == 4


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [(429, Unwell), (500, Unwell), (502, Lost), ((CUT,), Lost), ((GARBAGE,), Lost), ((HTML,), Lost)],
)
def test_trouble_that_stays_has_a_meaning(trouble, kind):
    with StubServer(lambda body, number: trouble) as stub:
        [[error], _] = ask(stub.address)
    assert isinstance(error, kind)
    assert stub.address in str(error)
    assert len(stub.bodies) == 4


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_not_tried_again(status):
    with StubServer(lambda body, number: status) as stub:
        [[error], _] = ask(stub.address)
    assert isinstance(error, Refused)
    assert f"status {status}" in str(error)
    assert len(stub.bodies) == 1


def test_lost_connections_in_a_row_suspend_a_server_until_a_probe_succeeds():
    patience = Patience(first_pause=0, longest_pause=0, tries=2, lost_before_suspension=5)
    good = {3}  # the third request succeeds, so that the count begins again
    with StubServer(lambda body, number: None if number in good else (CUT,)) as stub:
        results, server = ask(stub.address, patience=patience, times=4)
        assert [type(result).__name__ for result in results] == ["Lost", "Answer", "Lost", "Lost"]
        assert not server.suspended
        assert "127.0.0.1" in server.problem

        results, server = ask(stub.address, patience=patience, times=3)
        assert server.suspended
        # The fifth lost connection ended the third row's tries.
        assert len(stub.questions) == 7 + 5

        async def probe():
            revived = Server(stub.address, FORM, patience, concurrency=1)
            revived.suspended = True
            await revived.probe()
            await revived.close()
            return revived.suspended

        assert not asyncio.run(probe())
    assert stub.bodies[-1]["max_tokens"] == 1
    assert stub.bodies[-1].keys() == stub.bodies[0].keys()


def test_a_closed_port_is_a_lost_connection_and_an_endless_answer_too():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        [[error], _] = ask(f"127.0.0.1:{closed.getsockname()[1]}")
    assert isinstance(error, Lost)

    release = threading.Event()
    with StubServer(lambda body, number: release.wait(30) and None) as stub:
        patience = Patience(request=0.05, first_pause=0, longest_pause=0, tries=1)
        [[error], _] = ask(stub.address, patience=patience)
        release.set()
    assert isinstance(error, Lost)
    assert "no answer in 0.05 s" in str(error)


def test_loopback_servers_are_reached_past_a_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with StubServer() as stub:
        for host in ("127.0.0.1", "localhost"):
            [[answer], _] = ask(stub.address.replace("127.0.0.1", host))
            assert answer.text == "answer 1 to Hello"
