"""Sinks: where events go. One file a transport, all behind one protocol; a transport is loaded when it is used."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from bartleby.errors import InvalidSettings
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Publisher

KINDS: Mapping[str, tuple[str, str]] = {
    "nats": ("nats:NatsPublisher", "nats"),
    "rabbitmq": ("rabbitmq:RabbitPublisher", "rabbitmq"),
    "redis": ("redis:RedisPublisher", "redis"),
    "kafka": ("kafka:KafkaPublisher", "kafka"),
    "webhook": ("webhook:WebhookPublisher", "webhook"),
    "sentry": ("sentry:SentryPublisher", "webhook"),
    "log": ("log:LogPublisher", ""),
}
"""Each kind with its class and the extra that brings what it needs."""


def open_publisher(kind: str, options: Mapping[str, Any], timeout: float) -> Publisher:
    """Return a publisher of a kind, or raise InvalidSettings that says what is wrong with its options."""
    if kind not in KINDS:
        raise InvalidSettings(f"unknown kind of sink {kind!r}", hint=f"known kinds: {', '.join(KINDS)}")
    place, extra = KINDS[kind]
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(f"bartleby.sinks.{module}"), name)
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            f"a {kind} sink needs the package {error.name}", hint=f"pip install 'bartleby[{extra}]'"
        ) from error
    read = Options(kind, options)
    publisher = cast("type[Publisher]", found).open(read, timeout)
    read.done()
    return publisher
