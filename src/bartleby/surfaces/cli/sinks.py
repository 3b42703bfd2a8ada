"""`bartleby sinks`: where events go, how that does, and what is done to one."""

from typing import Any

import click

from bartleby.client import Client
from bartleby.errors import InvalidSettings, QueueInUse
from bartleby.surfaces.cli import sinks_words
from bartleby.surfaces.cli.confirming import NotUnderstood, acting, confirm, reason_of, signing
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.sinks_bus import reconcile, test

_TIMEOUT = 2.0
_KINDS = ("nats", "rabbitmq", "redis", "kafka", "webhook", "sentry", "log")
_ALERTED = ("slack", "pagerduty")


class _Kind(click.Choice[str]):
    """A kind of sink; what people look for under another name is told what it is here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401 - as click has it
        if str(value).lower() in _ALERTED:
            self.fail(f"{value} is a webhook here: add NAME webhook --option format=alert --option url=…", param, ctx)
        return super().convert(value, param, ctx)


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def sinks(context: click.Context, as_json: bool) -> None:
    """List where events go, or add and change a sink."""
    if context.invoked_subcommand is None:
        _list(context.obj, as_json=as_json)


sinks.add_command(test)
sinks.add_command(reconcile)


@sinks.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def list_(dsn: str | None, as_json: bool) -> None:
    """List the sinks and how each does."""
    _list(dsn, as_json=as_json)


def _list(dsn: str | None, *, as_json: bool) -> None:
    with client(dsn) as opened:
        found = opened.sinks()
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no sinks yet; add one: bartleby sinks add NAME KIND", err=True)
    else:
        sinks_words.show_list(found)


@sinks.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def show(dsn: str | None, name: str, as_json: bool) -> None:
    """Tell what is known of a sink, and what to do next."""
    with client(dsn) as opened:
        found = sinks_words.named(opened.sinks(), name)
    if as_json:
        show_json(found)
    else:
        sinks_words.show(found)


@sinks.command()
@click.argument("name")
@click.argument("kind", type=_Kind(_KINDS), metavar="KIND")
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="Of its kind; may be given several times."
)
@click.option(
    "--types", multiple=True, metavar="PATTERN", help="What it wants to hear of: group.*, dead_letter.created."
)
@click.option("--queues", multiple=True, metavar="QUEUE", help="Only of these queues.")
@click.option("--attempts", type=click.IntRange(1, 1000), help="Tries before it counts as a failure; 2.")
@click.option("--delay", type=click.FloatRange(min=0), help="Seconds between them; 0.5.")
@click.option("--timeout", type=click.FloatRange(min=0.01), help="Seconds for one; 2.")
@click.option("--include-payload/--no-payload", default=None, help="Payloads and headers, without secrets; left out.")
@click.option("--link", metavar="URL", help="Added to events; with {message_id}, {group_id} or {queue}.")
@signing
@click.pass_obj
def add(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    /,
    name: str,
    kind: str,
    options: tuple[str, ...],
    actor: str | None,
    reason: str | None,
    **settings: Any,  # noqa: ANN401 - as click has read them
) -> None:
    """Add a sink; if it exists, change what is given. From now on events wait for it, and the relay publishes them.

    KIND is nats, rabbitmq, redis, kafka, webhook (also for Slack and PagerDuty), sentry or log.

    VALUE is JSON, and where it is none a text. Secrets belong into the environment of the relay:
    env:BARTLEBY_SINK_TOKEN is what that variable holds there, and its name begins with BARTLEBY_SINK_. Options that are
    given replace all that there were.
    """
    given: dict[str, Any] = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    wanted = {key: value for key, value in given.items() if value not in (None, [])}
    if options:
        wanted["options"] = sinks_words.options_of(options)
    reason = reason_of(reason)
    with client(dsn) as opened:
        known = name in {each.name for each in opened.sinks()}
        if options or not known:
            _check(kind, wanted.get("options", {}))
        opened.put_sink(name, kind, wanted, **signed(operating(opened, actor), reason))
    click.echo(f"sink {name} is {'changed' if known else 'added'}; try it: bartleby sinks test {name}", err=True)


def _check(kind: str, options: dict[str, Any]) -> None:
    """Refuse options that cannot work anywhere; those that are merely not there here are the relay's concern."""
    from bartleby.sinks import open_publisher

    if unset := sinks_words.unset(kind, options):
        are = f"{', '.join(unset)} {'is' if len(unset) == 1 else 'are'}"
        click.echo(f"{are} not set here: the options are checked where the relay runs", err=True)
        return
    try:
        open_publisher(kind, options, _TIMEOUT)
    except InvalidSettings as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        click.echo(f"{error} where the relay runs: {error.hint}", err=True)


@sinks.command()
@click.argument("name")
@signing
@click.pass_obj
def pause(dsn: str | None, name: str, actor: str | None, reason: str | None) -> None:
    """Send nothing to a sink for now; events wait for it."""
    reason = reason_of(reason)
    with client(dsn) as opened:
        opened.pause_sink(name, **signed(operating(opened, actor), reason))
    click.echo(f"sink {name} is paused", err=True)


@sinks.command()
@click.argument("name")
@signing
@click.pass_obj
def resume(dsn: str | None, name: str, actor: str | None, reason: str | None) -> None:
    """Go on with a sink that was paused."""
    reason = reason_of(reason)
    with client(dsn) as opened:
        opened.resume_sink(name, **signed(operating(opened, actor), reason))
    click.echo(f"sink {name} is resumed", err=True)


@sinks.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="With what waits for it and what it refused, for good.")
@acting
@click.pass_obj
def remove(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, name: str, force: bool, actor: str | None, reason: str | None, yes: bool
) -> None:
    """Forget a sink for which nothing waits, or with --force any. The events themselves are kept."""
    with client(dsn) as opened:
        sink = sinks_words.named(opened.sinks(), name)
        if force and (sink.waiting or sink.refused):
            of = f"{name} with {sink.waiting:,} waiting and {sink.refused:,} refused"
            confirm("Remove", 1, of, noun="sink", yes=yes, typed=name)
        reason = reason_of(reason)
        try:
            opened.remove_sink(name, force=force, **signed(operating(opened, actor), reason))
        except QueueInUse as error:
            if "still has" not in str(error):
                raise
            text = f"sink {name} still has {sink.waiting:,} waiting and {sink.refused:,} refused"
            raise QueueInUse(text, hint=f"bartleby sinks remove {name} --force asks, and forgets them too") from None
    click.echo(f"sink {name} is removed", err=True)


@sinks.command()
@click.pass_obj
def metrics(dsn: str | None) -> None:
    """Print how the sinks do, as Prometheus reads it."""
    with client(dsn) as opened:
        click.echo(sinks_words.metrics(opened.sinks()))


@sinks.command()
@click.option("--prune", is_flag=True, help="Also remove sinks that the file does not name, if nothing waits for them.")
@signing
@click.pass_obj
def sync(dsn: str | None, prune: bool, actor: str | None, reason: str | None) -> None:
    """Make the sinks as [sinks.NAME] of bartleby.toml says. What it does not say stays as it is.

    \b
    [sinks.bus]
    kind = "nats"
    types = ["group.*"]
    options = { url = "nats://127.0.0.1:4222", password = "env:BARTLEBY_SINK_PASSWORD" }
    """  # noqa: D301 - click wants this character
    from bartleby.config import sink_tables

    tables = sink_tables()
    if not tables and not prune:
        raise NotUnderstood("bartleby.toml here has no [sinks.NAME]", "bartleby sinks sync --help shows one")
    why = reason_of(reason if reason is not None else "bartleby.toml")
    with client(dsn) as opened:
        by = signed(operating(opened, actor), why)
        for name, table in tables.items():
            settings = {key: value for key, value in table.items() if key != "kind"}
            click.echo(f"{name}: {_applied(opened, name, table['kind'], settings, by)}")
        for sink in opened.sinks() if prune else ():
            if sink.name not in tables:
                opened.remove_sink(sink.name, **by)
                click.echo(f"{sink.name}: removed")


def _applied(opened: Client, name: str, kind: str, settings: dict[str, Any], by: dict[str, Any]) -> str:
    before = _configuration(opened, name)
    if before is not None and before["kind"] == kind and _same(before, settings):
        return "as it is"
    if kind in _KINDS and isinstance(options := settings.get("options", {}), dict):
        _check(kind, options)
    opened.put_sink(name, kind, settings, **by)
    after = _configuration(opened, name) or {}
    changed = [key for key in after if before is not None and before[key] != after[key]]
    return "added" if before is None else f"changed {', '.join(changed)}" if changed else "as it is"


def _configuration(opened: Client, name: str) -> dict[str, Any] | None:
    for settings in opened.sink_settings():
        if settings.name == name:
            sink = sinks_words.named(opened.sinks(), name)
            return {
                "kind": sink.kind,
                "options": dict(settings.options),
                "types": list(sink.types),
                "queues": None if sink.queues is None else list(sink.queues),
                "attempts": sink.attempts,
                "delay": settings.delay,
                "timeout": settings.timeout,
                "include_payload": sink.include_payload,
                "link": sink.link,
            }
    return None


def _same(before: dict[str, Any], settings: dict[str, Any]) -> bool:
    return all(key in before and before[key] == value for key, value in settings.items())
