"""A message queue on PostgreSQL that takes failure seriously."""

from bartleby.client import AsyncClient, Client
from bartleby.errors import (
    BartlebyError,
    InvalidArgument,
    InvalidMessage,
    InvalidPolicy,
    InvalidQueueName,
    InvalidSettings,
    LeaseLost,
    NoConnection,
    NotInstalled,
    PayloadTooLarge,
    QueueInUse,
    UndecodablePayload,
    UnknownQueue,
    VersionMismatch,
    WrongIsolation,
)
from bartleby.message import DeadLetter, Decision, Failure, Lease, Message, Queue, Reaped
from bartleby.version import __version__

__all__ = [
    "AsyncClient",
    "BartlebyError",
    "Client",
    "DeadLetter",
    "Decision",
    "Failure",
    "InvalidArgument",
    "InvalidMessage",
    "InvalidPolicy",
    "InvalidQueueName",
    "InvalidSettings",
    "Lease",
    "LeaseLost",
    "Message",
    "NoConnection",
    "NotInstalled",
    "PayloadTooLarge",
    "Queue",
    "QueueInUse",
    "Reaped",
    "UndecodablePayload",
    "UnknownQueue",
    "VersionMismatch",
    "WrongIsolation",
    "__version__",
]
