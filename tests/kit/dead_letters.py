"""Dead letters, made by a client."""

from collections.abc import Iterable
from typing import Any

from bartleby import Client, Failure

TRACEBACK = 'Traceback (most recent call last):\n  File "shop.py", line 12, in bill\n    bill()\nKeyError: 7'


def bury(
    client: Client,
    payloads: Iterable[Any],
    *,
    queue: str = "orders",
    kind: str = "KeyError",
    error: str = "'x'",
    **options: Any,
) -> list[int]:
    """Send messages that all fail with the same error, and return their ids."""
    sent = [int(each) for each in client.send_many(queue, [{"payload": payload, **options} for payload in payloads])]
    while lease := client.claim(queue, "web-1", limit=1000):
        failures = [
            Failure(each.position, kind, error, fingerprint=f"{queue} {kind} {error}", verdict="dead") for each in lease
        ]
        client.fail(lease.id, failures)
    return sent


def statuses(client: Client, ids: Iterable[int]) -> list[str]:
    """Return the status of each letter; `none` if there is no such letter."""
    letters = [client.dead_letter(each) for each in ids]
    return ["none" if letter is None else letter.status for letter in letters]


def fail_next(client: Client, error: str = "7", queue: str = "orders", **more: Any) -> None:
    """Claim the next message and fail it, as a worker of version 1.4.2 does."""
    lease = client.claim(queue, "web-1:44", lease=60)
    assert lease is not None
    report = {"error_type": "KeyError", "traceback": TRACEBACK, "rule": "KeyError is transient", **more}
    report.setdefault("worker_version", "1.4.2")
    client.fail(lease.id, [Failure(lease.messages[0].position, error=error, **report)])


def finish_next(client: Client) -> None:
    lease = client.claim("orders", "w")
    assert lease is not None
    client.ack(lease.id)
