"""`bartleby demo`: the life of a failing message, on a PostgreSQL of its own that leaves nothing behind."""

import shutil
import tempfile
import time
from pathlib import Path

import click

from bartleby.client import Client
from bartleby.message import Failure
from bartleby.surfaces.cli.connecting import prepare


@click.command()
def demo() -> None:
    """Watch a message fail, die and be replayed. On a PostgreSQL of its own that leaves nothing behind."""
    from bartleby import dev

    folder = Path(tempfile.mkdtemp(prefix="bartleby-demo-"))
    try:
        started = time.monotonic()
        with dev.start(folder) as server:
            prepare(server.dsn)
            _say(f"A PostgreSQL of its own, with Bartleby in it: {time.monotonic() - started:.1f} s")
            with Client(server.dsn) as client:
                _live(client)
                _die(client)
                _replay(client)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    click.echo("\nNext: `bartleby dev` keeps a server running; `bartleby --help` lists the commands.")


def _live(client: Client) -> None:
    client.create_queue("orders", {"max_attempts": 2, "backoff": "fixed", "base": 0.2})
    ids = client.send_many("orders", [{"payload": {"order": number}, "key": f"order-{number}"} for number in (1, 2, 3)])
    _say(f"Sent {len(ids)} messages to queue orders: {ids}")
    lease = client.claim("orders", "demo", limit=10)
    assert lease is not None  # noqa: S101 - three were just sent
    _say(f"Claimed {len(lease)} under one lease; order 1 and 3 succeed, order 2 raises")
    client.ack(lease.id, [lease.messages[0].position, lease.messages[2].position])
    [decision] = client.fail(lease.id, [_broken(lease.messages[1].position)])
    _say(f"Verdict on order 2: {decision.verdict}, at {decision.retry_at:%H:%M:%S.%f}")


def _die(client: Client) -> None:
    lease = None
    while lease is None:
        time.sleep(client.idle("orders", 0.05).total_seconds())
        lease = client.claim("orders", "demo", limit=10)
    _say(f"It came back by itself: message {lease.messages[0].id}, attempt {lease.messages[0].attempt}")
    [decision] = client.fail(lease.id, [_broken(lease.messages[0].position)])
    [letter] = client.dead_letters("orders")
    _say(f"Verdict: {decision.verdict}. The dead letter, with its evidence:")
    for name in ("message_id", "queue", "reason", "error_type", "error", "attempts", "key", "raw"):
        click.echo(f"      {name:11} {getattr(letter, name)}")


def _replay(client: Client) -> None:
    [message_id] = client.replay([letter.message_id for letter in client.dead_letters("orders")],
                                 actor="demo", reason="the customer exists now")  # fmt: skip
    lease = client.claim("orders", "demo")
    assert lease is not None  # noqa: S101 - one was just replayed
    client.ack(lease.id)
    [queue] = client.queues()
    _say(f"Replayed message {message_id} under its own id, and it is done: {queue.dead} dead, {queue.ready} ready")


def _broken(position: int) -> Failure:
    return Failure(position, "KeyError", "'customer'", traceback='  File "shop.py", line 12, in bill\n    KeyError')


def _say(text: str) -> None:
    click.echo(f"  {click.style('•', fg='cyan')} {text}")
