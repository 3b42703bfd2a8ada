"""`bartleby relay`: publish events to the sinks."""

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import click

from bartleby.config import Settings
from bartleby.errors import UnknownSink
from bartleby.surfaces.cli.connecting import database, patient_client

if TYPE_CHECKING:
    from bartleby.relay import Relay


@click.command()
@click.option("--sink", "sinks", multiple=True, help="Only this sink; may be given several times.")
@click.option(
    "--look",
    type=click.FloatRange(min=0.05),
    default=2.0,
    show_default=True,
    help="Seconds between looks whether sinks were added, changed or removed.",
)
@click.option("--log", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_obj
def relay(dsn: str | None, sinks: tuple[str, ...], look: float, log: str) -> None:
    """Publish events to the sinks, those there are and those that are added later.

    A sink that is down is tried until it is back, and holds up no other; a database that is away is waited for. The
    relay does the upkeep of a worker too. There may be several of them: then the events of a message may arrive out of
    order, and carry a number that tells it. SIGTERM, or Ctrl-C, puts back what is not published.
    """
    from bartleby import telemetry
    from bartleby.relay import Relay

    telemetry.configure(as_json=log == "json")
    with database(dsn) as found, contextlib.suppress(KeyboardInterrupt):
        with patient_client(found) as opened:
            known = {each.name for each in opened.sink_settings()}
        for name in sinks:
            if name not in known:
                raise UnknownSink(f"unknown sink: {name!r}", hint="bartleby sinks lists them")
        asyncio.run(_run(Relay(Settings.load(dsn=found), sinks=sinks or None, look=look)))


async def _run(relay: "Relay") -> None:
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, relay.stop)
    await relay.run()
