"""`bartleby sinks test` and `bartleby sinks reconcile`: what speaks to the other side from here."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bartleby.config import Settings
from bartleby.errors import BartlebyError
from bartleby.events import Sink, SinkSettings
from bartleby.surfaces.cli import sinks_words
from bartleby.surfaces.cli.confirming import NotUnderstood, acting, actor_of, confirm, reason_of
from bartleby.surfaces.cli.connecting import client, database, operating, signed
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.progress import progress
from bartleby.surfaces.words import printable, when

if TYPE_CHECKING:
    from bartleby.reconciling import Found
    from bartleby.sinks.publisher import Outcome, Publisher


@click.command()
@click.argument("name")
@click.pass_obj
def test(dsn: str | None, name: str) -> None:
    """Publish one event of type io.bartleby.sink.test from here, and tell what became of it."""
    from bartleby.sinks.publisher import Published, Refused

    with client(dsn) as opened:
        sink = sinks_words.named(opened.sinks(), name)
        [settings] = [each for each in opened.sink_settings() if each.name == name]
    outcome = asyncio.run(_try(settings.kind, dict(settings.options), settings.timeout, _test_event(name, sink.kind)))
    match outcome:
        case Published():
            said = f": {outcome.note}" if outcome.note else ""
            click.echo(f"{name}: published{printable(said)}")
        case Refused():
            raise BartlebyError(f"sink {name} refuses it for good: {outcome.why}", hint=_remedy(sink))
        case _:
            raise BartlebyError(f"sink {name} does not take it now: {outcome.why}", hint=_remedy(sink))


def _remedy(sink: Sink) -> str:
    change = f"bartleby sinks add {sink.name} {sink.kind} --option KEY=VALUE"
    return f"see that it runs and can be reached from here; if its options are wrong, give them all anew: {change}"


def _test_event(name: str, kind: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "specversion": "1.0",
        "id": f"00000000.{int(now.timestamp() * 1_000_000)}",
        "source": "urn:bartleby:00000000-0000-0000-0000-000000000000",
        "type": "io.bartleby.sink.test",
        "subject": f"sink/{name}",
        "partitionkey": f"sink/{name}",
        "time": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "datacontenttype": "application/json",
        "dataschema": "urn:bartleby:event:1",
        "data": {"sink": name, "kind": kind},
    }


async def _try(kind: str, options: dict[str, Any], timeout: float, event: dict[str, Any]) -> "Outcome":  # noqa: ASYNC109 - it is the sink's
    from bartleby.sinks import open_publisher

    publisher = open_publisher(kind, options, timeout)
    try:
        [outcome] = await publisher.publish([event])
    finally:
        await _close(publisher)
    return outcome


@click.command()
@click.argument("name")
@click.option("--since", default="24h", show_default=True, metavar="TIME", help="From when: 24h, 7d, 2026-11-16T08:00.")
@click.option("--until", default="now", show_default=True, metavar="TIME", help="Until when, said likewise.")
@click.option("--missing/--all", "only_missing", default=True, help="What the sink does not have, or everything.")
@click.option("--dry-run", is_flag=True, help="Count, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@acting
@click.pass_obj
def reconcile(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    name: str,
    since: str,
    until: str,
    only_missing: bool,
    dry_run: bool,
    as_json: bool,
    actor: str | None,
    reason: str | None,
    yes: bool,
) -> None:
    """Send events again that a sink has lost, under the same ids: a bus can lose what it has acknowledged.

    What was emitted is compared with what the sink has. A sink that cannot be read is sent everything of that time with
    --all; whoever reads it knows by the ids what is not new. What still waits for the sink is left out.
    """
    now = datetime.now(UTC)
    window = sinks_words.moment(since, now), sinks_words.moment(until, now)
    if window[0] >= window[1]:
        raise NotUnderstood("--since is not before --until")
    actor_of(actor)
    with database(dsn) as address:
        with client(address) as opened:
            waiting = sinks_words.named(opened.sinks(), name).waiting
            [sink] = [each for each in opened.sink_settings() if each.name == name]
        found = asyncio.run(_compare(address, sink, window, only_missing=only_missing, hidden=as_json))
        sent = 0
        if found.events and not dry_run:
            facts = {"looked at": f"{found.looked:,} events until {when(found.until)}"}
            confirm("Send", found.events, f"to sink {name} again", noun="event", yes=yes, facts=facts)
            with client(address) as opened:
                by = signed(operating(opened, actor), reason_of(reason))
            sent = asyncio.run(_send(address, name, found, by, hidden=as_json))
    _tell(name, found, sent, waiting, only_missing=only_missing, as_json=as_json)


async def _compare(
    dsn: str, sink: SinkSettings, window: tuple[datetime, datetime], *, only_missing: bool, hidden: bool
) -> "Found":
    from bartleby.client import AsyncClient
    from bartleby.reconciling import Reconciler
    from bartleby.sinks import open_publisher
    from bartleby.sinks.publisher import Readable

    async with AsyncClient(settings=Settings.load(dsn=dsn)) as opened:
        reconciler = Reconciler(opened, sink.name)
        with progress("looking", None, hidden=hidden) as tell:
            if not only_missing:
                return await reconciler.everything(*window, on_progress=tell)
            publisher = open_publisher(sink.kind, sink.options, sink.timeout)
            try:
                if not isinstance(publisher, Readable):
                    text = f"a {sink.kind} sink cannot be asked what it has"
                    hint = f"everything of that time is sent again with: bartleby sinks reconcile {sink.name} --all"
                    raise BartlebyError(text, hint=hint)
                return await reconciler.missing(publisher, *window, on_progress=tell)
            except (OSError, TimeoutError) as error:
                raise BartlebyError(f"sink {sink.name} cannot be read: {error}") from None
            finally:
                await _close(publisher)


async def _send(dsn: str, name: str, found: "Found", by: dict[str, Any], *, hidden: bool) -> int:
    from bartleby.client import AsyncClient
    from bartleby.reconciling import Reconciler

    async with AsyncClient(settings=Settings.load(dsn=dsn)) as opened:
        with progress("sending", found.events, hidden=hidden) as tell:
            return await Reconciler(opened, name).send_again(found, on_progress=tell, **by)


def _tell(name: str, found: "Found", sent: int, waiting: int, *, only_missing: bool, as_json: bool) -> None:
    if as_json:
        until = found.until.isoformat()
        show_json({"sink": name, "looked": found.looked, "until": until, "found": found.events, "sent": sent})
        return
    missing = f"{found.events:,} missing" if only_missing else f"{found.events:,} to send"
    click.echo(f"{name}: {found.looked:,} events looked at, {missing}, {sent:,} sent again")
    if waiting:
        text = f"{waiting:,} references wait for it, and what is younger than the oldest was left out"
        click.echo(f"{text}; look again when they are published", err=True)
    if sent and only_missing:
        again = f"when the relay has published them, look again: bartleby sinks reconcile {name} --dry-run"
        click.echo(again, err=True)


async def _close(publisher: "Publisher") -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            await publisher.close()
