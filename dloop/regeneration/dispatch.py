"""One queue for all servers: whoever has a free slot takes the next row, whoever dies gives its rows back.

The input is read only as fast as rows are taken, so no more rows are in memory than requests are under way. Knows
how rows and servers fail, not how requests are made (`servers.py`) or rows kept (`ledger.py`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from dloop.cli import UserError
from dloop.regeneration.dialogue import Dialogue, Outcome, Rejected
from dloop.regeneration.servers import Lost, Patience, Refused, Server, Unwell

MOST_RETURNS = 3
"""A row is given back so often when its connections are lost; then it is taken for the cause, and an error row."""
REFUSALS_AT_START = 8
"""So many refused rows before the first answer mean that the form of the requests is wrong, not the rows."""


class Dispatcher:
    """Sends `dialogues` to `servers` and hands each `Outcome` to `deliver`, in the order they finish."""

    def __init__(
        self,
        servers: Sequence[Server],
        dialogues: Iterable[Dialogue],
        deliver: Callable[[Outcome], None],
        patience: Patience,
        say: Callable[[str], None] = print,
    ) -> None:
        self._servers = servers
        self._source: Iterator[Dialogue] = iter(dialogues)
        self._deliver, self._patience, self._say = deliver, patience, say
        self._returned: deque[Dialogue] = deque()
        self._under_way = 0
        self._exhausted = False
        self._answered = False
        self._refusals = 0
        self._finished = asyncio.Event()
        self._changed = asyncio.Condition()

    async def run(self, concurrency: int) -> None:
        """Until every dialogue has an outcome. Raises `UserError` if no server is left, or none accepts the form."""
        await self._first_probes()
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in self._servers:
                    tasks.create_task(self._watch(server))
                    for _ in range(concurrency):
                        tasks.create_task(self._serve(server))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await asyncio.gather(*(server.close() for server in self._servers))

    async def _first_probes(self) -> None:
        problems = await asyncio.gather(*(self._probe(server) for server in self._servers))
        if all(problems):
            raise UserError(f"no server answers ({problems[0]}): start the servers or check --server-address")

    async def _probe(self, server: Server) -> str | None:
        """What is wrong with a server, None if it is up. A refusal stops the run: the form would fail every row."""
        try:
            await server.probe()
        except (Lost, Unwell) as error:
            return str(error)
        except Refused as error:
            raise UserError(
                f"a server refuses the form of the requests ({error}): check --model and leave out the options "
                "it does not know"
            ) from error
        return None

    async def _serve(self, server: Server) -> None:
        """One slot of a server: take a row, answer it, take the next."""
        while dialogue := await self._take(server):
            outcome = await self._answered_by(server, dialogue)
            if outcome:
                self._deliver(outcome)
            else:
                self._returned.append(dialogue)
            await self._put_down(server)

    async def _take(self, server: Server) -> Dialogue | None:
        """The next row for a server that is up; None when all are done."""
        async with self._changed:
            while not self._finished.is_set():
                dialogue = None if server.suspended else self._next()
                if dialogue:
                    self._under_way += 1
                    return dialogue
                if not self._finish_if_done():
                    await self._changed.wait()
        return None

    def _next(self) -> Dialogue | None:
        if self._returned:
            return self._returned.popleft()
        if self._exhausted:
            return None
        dialogue = next(self._source, None)
        self._exhausted = dialogue is None
        return dialogue

    def _finish_if_done(self) -> bool:
        if self._exhausted and not self._returned and not self._under_way:
            self._finished.set()
            self._changed.notify_all()
        return self._finished.is_set()

    async def _put_down(self, server: Server) -> None:
        async with self._changed:
            self._under_way -= 1
            if server.suspended or self._returned or (self._exhausted and not self._under_way):
                self._changed.notify_all()

    async def _answered_by(self, server: Server, dialogue: Dialogue) -> Outcome | None:
        """The outcome of a row; None if its connections were lost, and whoever is up shall go on with it."""
        try:
            while (messages := dialogue.request()) is not None:
                dialogue.add(await server.answer(messages))
                self._answered = True
            return dialogue.finished()
        except Rejected as rejection:
            self._answered = True
            return dialogue.failed(rejection.status, rejection.reason, rejection.answer)
        except Refused as error:
            self._count_refusal(error)
            return dialogue.failed("error", str(error))
        except Unwell as error:
            return dialogue.failed("error", str(error))
        except Lost as error:
            if dialogue.returns == MOST_RETURNS:
                return dialogue.failed("error", str(error))
            dialogue.returns += 1
            return None

    def _count_refusal(self, error: Refused) -> None:
        self._refusals += 1
        if not self._answered and self._refusals >= REFUSALS_AT_START:
            raise UserError(
                f"the first {self._refusals} rows were all refused ({error}): correct the options, then run again "
                "with --resume"
            )

    async def _watch(self, server: Server) -> None:
        """Probe a server while it is suspended. Raises `UserError` once all are, and none came back."""
        while not self._finished.is_set():
            if not server.suspended:
                await self._wait_for_change(server)
                continue
            self._say(f"server suspended: {server.problem}")
            while await self._still_down(server):
                if all(other.failed_probes for other in self._servers):
                    raise UserError(
                        f"no server answers any more ({server.problem}): start them again, then run the same "
                        "command with --resume"
                    )

    async def _wait_for_change(self, server: Server) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: server.suspended or self._finished.is_set())

    async def _still_down(self, server: Server) -> bool:
        """Wait for the next probe and make it; False if the server is up again, or nothing is left to do."""
        try:
            await asyncio.wait_for(self._finished.wait(), self._patience.probe_interval)
        except TimeoutError:
            pass
        else:
            return False
        try:
            await server.probe()
        except (Lost, Unwell, Refused):
            return True
        self._say(f"server up again: {server.address}")
        async with self._changed:
            self._changed.notify_all()
        return False
