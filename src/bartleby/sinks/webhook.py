"""Events as signed webhooks: one POST each, in the format of Standard Webhooks, or as an alert for people.

What an answer means: 2xx is published. 3xx, 5xx, no answer, and what somebody has to mend at the address or the
credentials (401, 403, 404, 405, 407) is not now: the event waits. 429 and 503 are not now either, and their Retry-After
is heeded. Any other 4xx, 410 among them, is about this event or meant for ever: it is refused, and put aside.
"""

import base64
import binascii
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeAlias

from bartleby.sinks.alert import alert
from bartleby.sinks.http import Client, client, in_parallel, judged
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Outcome

_PREFIX = "whsec_"
_SHORTEST_SECRET = 24
_MOST_AT_ONCE = 100
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")
_OURS = re.compile(
    r"host|user-agent|content-.*|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|proxy-.*|webhook-.*"
)
Render: TypeAlias = Callable[[Event], bytes]


class WebhookPublisher:
    """Posts events to a URL, several at once over connections that are kept."""

    def __init__(self, to: Client, secrets: Sequence[bytes], headers: Mapping[str, str], render: Render) -> None:
        self._to = to
        self._secrets = secrets
        self._headers = headers
        self._render = render

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings; nothing is connected yet."""
        form = options.choice("format", ["event", "alert"], "event")
        secrets = _secrets(options, needed=form == "event")
        routing_key = options.optional("routing_key")
        at_once = int(options.number("concurrency", 8, least=1, most=_MOST_AT_ONCE))
        to = client(options, "url", options.text("url"), timeout, connections=at_once)
        headers = _headers(options)
        if form == "alert":
            return cls(
                to, secrets, {**headers, "Content-Type": "application/json"}, lambda e: _json(alert(e, routing_key))
            )
        return cls(to, secrets, {**headers, "Content-Type": "application/cloudevents+json"}, _json)

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, and return what became of each, in their order."""
        return await in_parallel(events, self._send, self._to.connections)

    async def close(self) -> None:
        """Let go of the connections; publish() would make new ones."""
        await self._to.close()

    async def _send(self, event: Event) -> Outcome:
        content = self._render(event)
        headers = {**self._headers, **signed(str(event["id"]), int(time.time()), content, self._secrets)}
        return judged(await self._to.post(headers, content))


def signed(event_id: str, timestamp: int, content: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """Return the headers of Standard Webhooks, with a signature for each secret: a receiver knows one of them."""
    headers = {"webhook-id": event_id, "webhook-timestamp": str(timestamp)}
    if secrets:
        text = f"{event_id}.{timestamp}.".encode() + content
        digests = [hmac.digest(secret, text, "sha256") for secret in secrets]
        headers["webhook-signature"] = " ".join(f"v1,{base64.b64encode(each).decode()}" for each in digests)
    return headers


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _secrets(options: Options, *, needed: bool) -> list[bytes]:
    given = options.texts("secret")
    if needed and not given:
        kind = f"{_PREFIX} and {_SHORTEST_SECRET} or more bytes in base64"
        raise options.bad("secret", f"expected {kind}; or for Slack and PagerDuty format=alert, which needs none")
    return [_secret(options, each) for each in given]


def _secret(options: Options, given: str) -> bytes:
    bare = given.removeprefix(_PREFIX).rstrip("=")
    try:
        secret = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        secret = b""
    if not given.startswith(_PREFIX) or len(secret) < _SHORTEST_SECRET:
        raise options.bad("secret", f"expected {_PREFIX} and {_SHORTEST_SECRET} or more bytes in base64")
    return secret


def _headers(options: Options) -> dict[str, str]:
    headers = options.mapping("headers")
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or _OURS.fullmatch(name.lower()):
            raise options.bad("headers", "expected names of headers, other than those that are set anyway")
        if not _VALUE.fullmatch(value):
            raise options.bad("headers", f"expected one line of ASCII in {name}")
    return headers
