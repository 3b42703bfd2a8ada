"""Changes that are asked for twice and done once.

Whoever hears no answer asks again, with the same `Idempotency-Key`. The deed and its answer are one transaction, so
both are there or neither; whoever asks again within a day gets the first answer (`Idempotent-Replay: true`). Of two at
once the second waits. Refusals are not kept: what was refused may be asked for again. Keys of others are others.

    return once(request, desk, lambda desk: answer(desk.replays.start(7, reason=asked.reason)))
"""

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from fastapi import Request
from starlette.responses import Response

from bartleby.client import Client, Runner
from bartleby.credentials import Answer
from bartleby.errors import InvalidArgument
from bartleby.principal import Permission, Principal
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import house

if TYPE_CHECKING:
    from bartleby.surfaces.limits import BodyDigest

KEY = "Idempotency-Key"
REPLAYED = "Idempotent-Replay"
_LONGEST_KEY = 200
_KEPT_HEADERS = ("content-type", "location", "etag")


def once(request: Request, desk: Desk, act: Callable[[Desk], Response], *, whole: bool = True) -> Response:
    """Return what `act` answers, or what it answered when the same request came before.

    With `whole=False` the deed is not one transaction, for it may be long and doing it twice is harmless; then its
    answer is kept afterwards, and of two at once the second does not wait: it is told that it is done already.
    """
    key, operator = request.headers.get(KEY), house(request).operator
    if key is None or operator is None or not desk.principal.may(Permission.PROPOSE):
        return act(desk)
    if not 0 < len(key) <= _LONGEST_KEY or not key.isascii() or not key.isprintable():
        raise InvalidArgument(f"{KEY} has 1 to {_LONGEST_KEY} printable characters", hint="a UUID, for example")
    taken = _Taken(_owner(desk.principal), key, _asked(request))
    return taken.whole(operator, desk, act) if whole else taken.in_parts(operator, desk, act)


class _Taken:
    """One request that has a key."""

    def __init__(self, owner: str, key: str, asked: str) -> None:
        self._owner = owner
        self._key = key
        self._asked = asked

    def whole(self, operator: Client, desk: Desk, act: Callable[[Desk], Response]) -> Response:
        refusals: list[dict[str, object]] = []
        try:
            with operator.transaction() as runner:
                before = runner.take_answer(self._owner, self._key, self._asked)
                if before is not None:
                    return _again(before)
                response = act(desk.within(runner, refusals))
                self._keep(runner, response)
                return response
        finally:
            for each in refusals:  # of an agent: all else is undone, the lines of the audit are to stay
                desk.seat.refused(each)

    def in_parts(self, operator: Client, desk: Desk, act: Callable[[Desk], Response]) -> Response:
        before = operator.take_answer(self._owner, self._key, self._asked)
        if before is not None:
            return _again(before)
        response = act(desk)
        self._keep(operator, response)
        return response

    def _keep(self, runner: Runner, response: Response) -> None:
        headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
        body = bytes(response.body).decode()
        kept = json.dumps({"headers": headers, "body": body}, ensure_ascii=False)
        runner.keep_answer(self._owner, self._key, response.status_code, kept)


def _again(before: Answer) -> Response:
    kept = json.loads(before.body or "{}")
    headers = {**kept.get("headers", {}), REPLAYED: "true"}
    return Response(kept.get("body") or None, before.status, headers)


def _owner(principal: Principal) -> str:
    # two tokens may have one name; an answer is only for who may do as much
    queues = "" if principal.queues is None else "\n".join(sorted(principal.queues))
    rights = hashlib.sha256(f"{principal.role}\n{principal.queues is None}\n{queues}".encode()).hexdigest()[:16]
    return f"{principal.name}/{rights}"


def _asked(request: Request) -> str:
    digest = cast("BodyDigest", request.state.body)
    return f"{request.method} {request.url.path}?{request.url.query}\n{digest.hex()}"
