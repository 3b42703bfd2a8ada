"""What a request finds: the house (pools, settings), and the desk of whoever asks."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from bartleby.client import Client
from bartleby.documents import Redaction
from bartleby.principal import Principal
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.limits import Streams
from bartleby.surfaces.pools import Pools
from bartleby.surfaces.web.authenticating import Recogniser
from bartleby.surfaces.web.settings import ConsoleSettings


@dataclass(frozen=True, slots=True)
class House:
    """What all requests share."""

    pools: Pools
    redaction: Redaction
    settings: ConsoleSettings
    recogniser: Recogniser
    streams: Streams

    @property
    def reader(self) -> Client:
        """What looks things up."""
        return self.pools.reader

    @property
    def operator(self) -> Client | None:
        """What changes things; None if the user of the database only reads."""
        return self.pools.operator

    def close(self) -> None:
        """Close all connections."""
        self.pools.close()


def house(request: Request) -> House:
    """Return what all requests share."""
    return cast("House", request.app.state.house)


def principal(request: Request) -> Principal:
    """Return who asks; whoever got past the door has been recognised."""
    return cast("Principal", request.state.principal)


def desk(request: Request) -> Desk:
    """Return the desk of whoever asks."""
    shared = house(request)
    return Desk(
        principal(request),
        reader=shared.reader,
        operator=shared.operator,
        redaction=shared.redaction,
        request_id=request.state.request_id,
    )


AtDesk = Annotated[Desk, Depends(desk)]
"""A parameter of an endpoint: the desk of whoever asks."""
