"""An OpenAI-compatible server on loopback that answers as a function of the messages, and misbehaves on demand."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CUT, GARBAGE, HTML = "cut", "garbage", "html"
"""Ways to misbehave: close the connection half-way, send broken JSON, send a page of HTML."""


def default_answer(body):
    """The k-th answer names the k-th question, so that a wrong history shows."""
    questions = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return f"answer {len(questions)} to {questions[-1]}"


class StubServer:
    """Use as a context manager. `behave(body, number)` may return an answer's text, a message (dict), an HTTP status,
    or one of CUT, GARBAGE, HTML in a tuple; None means the default answer. `bodies` are the requests so far.
    """

    def __init__(self, behave=lambda body, number: None, port=0):
        self.behave = behave
        self.bodies = []
        self.dead = False
        self.refuse_probes = False
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    @property
    def questions(self):
        """Requests that are not probes."""
        return [body for body in self.bodies if body["max_tokens"] != 1]

    def record(self, body):
        with self._lock:
            self.bodies.append(body)
            return len(self.questions)

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request, client_address):
        """A client that was killed is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StubServer

    def do_GET(self):
        self._send(200 if self.path == "/health" else 404, b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.stub.dead or self.path != "/v1/chat/completions":
            self.close_connection = True
            return
        number = self.stub.record(body)
        reply = self.stub.behave(body, number) if self.stub.refuse_probes or body["max_tokens"] != 1 else None
        if self.stub.dead:
            self.close_connection = True
        elif isinstance(reply, int):
            self._send(reply, json.dumps({"error": {"message": f"status {reply}"}}).encode())
        elif isinstance(reply, tuple):
            self._misbehave(reply[0])
        else:
            self._send(200, json.dumps(completion(body, reply)).encode())

    def _misbehave(self, how):
        if how == CUT:
            self._send(200, b'{"choices": [', length=1000)
            self.close_connection = True
        elif how == HTML:
            self._send(200, b"<html>busy</html>", kind="text/html")
        else:
            self._send(200, b'{"choices": [')

    def _send(self, status, data, kind="application/json", length=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *_):
        pass


def completion(body, reply=None):
    """A chat completion with the text or message `reply`, or the default answer."""
    message = reply if isinstance(reply, dict) else {"content": default_answer(body) if reply is None else reply}
    finish = message.pop("finish_reason", "stop")
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
