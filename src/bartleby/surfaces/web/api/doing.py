"""Writes of the API: each is done once for an `Idempotency-Key`, however often it is sent."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header, Request
from starlette.responses import Response

from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.api.answering import answer
from bartleby.surfaces.web.api.asking import raw_body
from bartleby.surfaces.web.context import desk
from bartleby.surfaces.web.writing import KEY, once

Key = Annotated[
    str | None,
    Header(
        alias=KEY,
        pattern="^[ -~]{1,200}$",
        description="sent again within a day, with the same body, the first answer comes again and nothing is done",
    ),
]
Act = Callable[[Desk], object]


class Writer:
    """Does what a request asks for, and answers."""

    def __init__(self, request: Request, desk: Desk, body: str) -> None:
        self._request, self._desk = request, desk
        self.body = body

    def __call__(self, act: Act, status: int = 200) -> Response:
        """Do it in one transaction with what is kept of the answer."""
        return once(self._request, self._desk, lambda desk: answer(act(desk), status))

    def showing(self, act: Act, look: Act) -> Response:
        """Do it, and answer with what there is then."""
        return self(lambda desk: (act(desk), look(desk))[1])

    def bulk(self, act: Act) -> Response:
        """Do it in transactions of its own, and keep the answer afterwards: doing it twice is harmless."""
        return once(self._request, self._desk, lambda desk: answer(act(desk)), whole=False)


def writer(
    request: Request,
    at: Annotated[Desk, Depends(desk)],
    body: Annotated[str, Depends(raw_body)],
    _key: Key = None,
) -> Writer:
    """Return what does the writes of a request."""
    return Writer(request, at, body)


Writing = Annotated[Writer, Depends(writer)]
"""A parameter of an endpoint that changes something."""
