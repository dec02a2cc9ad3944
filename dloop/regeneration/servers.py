"""One OpenAI-compatible server: the form of a request, its retries, and what each failure means for the row.

Talks to SGLang, vLLM and their like. It knows nothing of rows or files, and nothing of other servers: which server
gets which row is decided in `dispatch.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential, wait_random

from dloop.regeneration.dialogue import Answer, Message, Reasoning

_REASON = 300
"""Characters of a server's reason that are told."""
_THINKING: dict[Reasoning, bool | None] = {"none": None, "disable": False, "save": True}


@dataclass(frozen=True, kw_only=True)
class RequestForm:
    """What every request has in common."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    reasoning: Reasoning = "disable"

    def body(self, messages: list[Message], max_tokens: int) -> dict[str, Any]:
        """Arguments of the client's `chat.completions.create`; options that are not set are not sent."""
        extra: dict[str, Any] = {} if self.top_k is None else {"top_k": self.top_k}
        thinking = _THINKING[self.reasoning]
        if thinking is not None:
            extra["chat_template_kwargs"] = {"enable_thinking": thinking}
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "extra_body": extra,
        }
        return body if self.top_p is None else body | {"top_p": self.top_p}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, in seconds, and how often to try."""

    request: float = 3600.0
    """For one answer."""
    connect: float = 10.0
    probe: float = 60.0
    """For the one-token answer that tells whether a server is up."""
    tries: int = 4
    first_pause: float = 1.0
    """Before the second try; doubled for each further one."""
    longest_pause: float = 30.0
    lost_before_suspension: int = 5
    """Requests in a row without an answer, after which a server is suspended."""
    probe_interval: float = 30.0
    """Between two probes of a suspended server."""


class Lost(Exception):
    """No answer came: connection refused or cut, time ran out, nobody behind a gateway, or nonsense instead of one."""


class Unwell(Exception):
    """The server answered that it cannot (429, other 5xx)."""


class Refused(Exception):
    """The server does not accept this request (any other 4xx)."""


class Server:
    """A server by its address `host:port` (or an http address up to `/v1`), with `concurrency` connections."""

    def __init__(self, address: str, form: RequestForm, patience: Patience, concurrency: int) -> None:
        self.address = address
        self.suspended = False
        self.problem = ""
        """What went wrong last."""
        self.failed_probes = 0
        """Since the server was last up."""
        self._form, self._patience = form, patience
        self._lost_in_a_row = 0
        base = address if "://" in address else f"http://{address}"
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1
        )
        self._client = openai.AsyncOpenAI(
            base_url=base.rstrip("/").removesuffix("/v1") + "/v1",
            api_key="none",
            max_retries=0,  # there is one retry layer, and it is below
            timeout=openai.Timeout(patience.request, connect=patience.connect),
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not _is_loopback(base), limits=limits),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def answer(self, messages: list[Message]) -> Answer:
        """The reply to `messages`. Raises `Lost`, `Unwell` or `Refused` when every try has failed.

        Tries stop early once the server is suspended.
        """
        patience = self._patience
        tries = AsyncRetrying(
            stop=self._gives_up,
            wait=wait_exponential(patience.first_pause, patience.longest_pause) + wait_random(0, patience.first_pause),
            retry=retry_if_exception_type((Lost, Unwell)),
            reraise=True,
        )
        return await tries(self._counted, messages)

    def _gives_up(self, state: RetryCallState) -> bool:
        return self.suspended or state.attempt_number >= self._patience.tries

    async def _counted(self, messages: list[Message]) -> Answer:
        """One try; enough lost ones in a row suspend the server."""
        try:
            answer = await self._complete(messages, self._form.max_tokens, self._patience.request)
        except Lost as error:
            self.problem = str(error)
            self._lost_in_a_row += 1
            self.suspended = self.suspended or self._lost_in_a_row >= self._patience.lost_before_suspension
            raise
        except (Unwell, Refused):
            self._lost_in_a_row = 0
            raise
        self._lost_in_a_row = 0
        return answer

    async def probe(self) -> None:
        """Ask for one token in the form of all requests; raises as `answer`. Ends or begins a suspension."""
        try:
            await self._complete([{"role": "user", "content": "Hello"}], 1, self._patience.probe)
        except (Lost, Unwell, Refused) as error:
            self.suspended, self.problem = True, str(error)
            self.failed_probes += 1
            raise
        self.suspended, self.failed_probes, self._lost_in_a_row = False, 0, 0

    async def _complete(self, messages: list[Message], max_tokens: int, seconds: float) -> Answer:
        try:
            # The client's own limit is for silence, this one for the whole answer.
            async with asyncio.timeout(seconds):
                reply = await self._client.chat.completions.create(**self._form.body(messages, max_tokens))
        except TimeoutError as error:
            raise Lost(f"{self.address}: no answer in {seconds:g} s") from error
        except openai.APIConnectionError as error:
            raise Lost(f"{self.address}: {_cause(error)}") from error
        except openai.APIStatusError as error:
            # Not every server wraps its reason as the client expects, so that the client's message may hold none.
            reason = error.response.text.strip()[:_REASON] or error.message
            raise _meaning(error.status_code)(f"{self.address}: HTTP {error.status_code}: {reason}") from error
        except (openai.APIError, ValueError) as error:
            raise Lost(f"{self.address}: not a chat completion ({_cause(error)})") from error
        return self._read(reply)

    def _read(self, reply: Any) -> Answer:
        # The client checks no types, and hands out a reply that is not JSON as text.
        choices = getattr(reply, "choices", None)
        if not choices or getattr(choices[0], "message", None) is None:
            raise Lost(f"{self.address}: not a chat completion ({str(reply)[:80]!r})")
        message = choices[0].message
        thought = getattr(message, "reasoning_content", None)
        return Answer(message.content, thought, choices[0].finish_reason)


def _meaning(status: int) -> type[Lost | Unwell | Refused]:
    if status in (502, 503, 504):
        return Lost
    return Refused if 400 <= status < 500 and status != 429 else Unwell


def _is_loopback(base: str) -> bool:
    """A proxy that the environment names cannot reach this machine's own servers."""
    host = urlsplit(base).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__} {cause}".strip()
