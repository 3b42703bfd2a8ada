"""One message through its handler, without a database: what `bartleby repro` writes is a test of this kind."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from bartleby.app import Bartleby
from bartleby.deadlines import late
from bartleby.execute import Executor, Settlement
from bartleby.failure import Evidence
from bartleby.message import LeaseId, Message, MessageId, Position, encode


def run(
    app: Bartleby,
    queue: str,
    payload: object = None,
    *,
    raw: str | None = None,
    headers: dict[str, Any] | None = None,
    key: str | None = None,
    attempt: int = 1,
    message_id: int = 1,
    generation: int | None = None,
    created_at: datetime | None = None,
) -> None:
    """Run the handler of a queue for one message, as a worker would and without a database.

    It returns if the message would be done, and raises what the handler raised, or returned as an outcome. `raw` is
    the payload as JSON text, for one that Python cannot write down.
    """
    __tracebackhide__ = True
    [handler] = app.handlers_for([queue])
    message = Message(
        MessageId(message_id),
        queue,
        LeaseId(1),
        Position(1),
        attempt,
        encode(payload) if raw is None else raw,
        encode(headers) if headers else None,
        key,
        generation,
        created_at or datetime.now(UTC),
        solo=True,
    )
    witness = _Witness(handler, app.recorder(), app.version)
    witness.work(message)
    if witness.seen is not None:
        raise witness.seen


class _Witness(Executor):
    """Keeps what was raised instead of judging it."""

    seen: BaseException | None = None

    def judge(self, message: Message, error: BaseException, evidence: Evidence | None = None) -> Settlement:
        del message, evidence
        self.seen = error
        return None

    def work(self, message: Message) -> None:
        if not self.handler.awaited:
            self._in_time(message)
        elif _in_a_loop():
            with ThreadPoolExecutor(1, "bartleby-run") as thread:
                thread.submit(lambda: asyncio.run(self._awaited_run(message))).result()
        else:
            asyncio.run(self._awaited_run(message))

    def _in_time(self, message: Message) -> None:
        limit = self.handler.timeout
        if limit is None:
            self._plain_run(message)
            return
        thread = threading.Thread(target=self._plain_run, args=(message,), daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():  # it cannot be stopped, and is left behind
            self.seen = TimeoutError(late(limit))

    def _plain_run(self, message: Message) -> None:
        if self.handler.batch is None:
            self.run_here(message)
        else:
            self.run_batch_here([message])

    async def _awaited_run(self, message: Message) -> None:
        await (self.run(message) if self.handler.batch is None else self.run_batch([message]))


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
