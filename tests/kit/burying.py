"""Dead letters for tests of commands."""

from collections.abc import Iterable
from typing import Any

from bartleby import Client, Failure


def bury(
    client: Client,
    payloads: Iterable[Any],
    *,
    queue: str = "orders",
    kind: str = "KeyError",
    error: str = "'x'",
    key: str | None = None,
    headers: dict[str, Any] | None = None,
) -> list[int]:
    """Send messages that all fail with the same error, and return their ids."""
    options = {name: value for name, value in {"key": key, "headers": headers}.items() if value is not None}
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
