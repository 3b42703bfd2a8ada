"""`bartleby groups`: what the dead letters died of, one bug at a time, and what people say about it."""

import json
from datetime import UTC, datetime
from typing import Any

import click

from bartleby.client import Client
from bartleby.errors import UnknownGroup, UnknownQueue
from bartleby.evidence import Group, GroupRule
from bartleby.surfaces.cli import group_words
from bartleby.surfaces.cli.confirming import NotUnderstood, actor_of, reason_of, signing
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.ends import end_of, for_a_time
from bartleby.surfaces.cli.group_view import document, gather, show_list, tell
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.words import line, when

_STATES = ("open", "acknowledged", "muted", "resolved", "regressed")
_LONGEST = 200
_LARGEST = 2**63 - 1

group_id = click.argument("group_id", metavar="ID", type=click.IntRange(min=1, max=_LARGEST))


class _Groups(click.Group):
    """A number is a group to show; what is no command may be meant as a queue."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the words mean."""
        if args[0].isascii() and args[0].isdigit():
            args = ["show", *args]
        elif args[0] not in self.commands and not args[0].startswith("-"):
            raise NotUnderstood(
                f"no such command: groups {args[0]}", f"of one queue: bartleby groups --queue {args[0]}"
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Groups, invoke_without_command=True)
@click.option("--queue", help="Only of this queue.")
@click.option("--state", "states", multiple=True, type=click.Choice(_STATES), help="May be given several times.")
@click.option("--all", "everything", is_flag=True, help="Also those that have no dead letters any more.")
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def groups(  # noqa: PLR0917 - click passes them by name
    context: click.Context, queue: str | None, states: tuple[str, ...], everything: bool, limit: int, as_json: bool
) -> None:
    """List what the dead letters died of.

    Many letters are often few bugs; those with the most dead letters come first. `bartleby groups ID` shows one.
    """
    if context.invoked_subcommand is not None:
        return
    with client(context.obj) as opened:
        found = opened.groups(queue, limit=limit, states=states or None, everything=everything)
        if queue is not None and not found and queue not in {each.name for each in opened.queues()}:
            raise UnknownQueue(f"unknown queue: {queue!r}", hint="bartleby queues lists them")
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no such groups" if states else "no dead letters", err=True)
    else:
        show_list(found, datetime.now(UTC), cut=len(found) == limit)


@groups.command()
@group_id
@click.option("--all", "everything", is_flag=True, help="The whole traceback, and every value that the letters share.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def show(dsn: str | None, group_id: int, everything: bool, as_json: bool) -> None:
    """Tell what is known of a group, and what to do next."""
    with client(dsn) as opened:
        found = gather(opened, _found(opened, group_id))
    if as_json:
        show_json(document(found))
    else:
        tell(found, datetime.now(UTC), everything=everything)


@groups.command()
@group_id
@click.option("--owner", help="Who looks after it; you, if not given.")
@click.option("--link", help="Where it is discussed; http:// or https://.")
@signing
@click.pass_obj
def ack(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, group_id: int, owner: str | None, link: str | None, actor: str | None, reason: str | None
) -> None:
    """Say that somebody looks after it. The reason becomes its note."""
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        opened.acknowledge_group(group_id, owner=owner, link=link, **signed(operating(opened, actor), reason))
        _told(opened, group_id)


@groups.command()
@group_id
@for_a_time
@signing
@click.pass_obj
def mute(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, group_id: int, length: str | None, until: str | None, actor: str | None, reason: str | None
) -> None:
    """Tell nobody of it for a time. Its letters are kept as ever."""
    end = end_of(length, until, datetime.now(UTC))
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        opened.mute_group(group_id, end, **signed(operating(opened, actor), reason))
        _told(opened, group_id)


@groups.command()
@group_id
@click.option("--in", "version", metavar="VERSION", help="Seen from this version or a later one, it has regressed.")
@signing
@click.pass_obj
def resolve(dsn: str | None, group_id: int, version: str | None, actor: str | None, reason: str | None) -> None:
    """Say that the bug is mended. Its dead letters stay until they are replayed or discarded."""
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        opened.resolve_group(group_id, version=version, **signed(operating(opened, actor), reason))
        group = _told(opened, group_id)
    if group.dead:
        left = "1 dead letter is" if group.dead == 1 else f"{group.dead:,} dead letters are"
        click.echo(f"{left} left: bartleby replay group:{group_id}", err=True)


@groups.command()
@group_id
@signing
@click.pass_obj
def reopen(dsn: str | None, group_id: int, actor: str | None, reason: str | None) -> None:
    """Make it open again, neither acknowledged, muted nor resolved."""
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        opened.reopen_group(group_id, **signed(operating(opened, actor), reason))
        _told(opened, group_id)


@groups.command()
@click.argument("group_ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(min=1, max=_LARGEST))
@click.option("--into", required=True, metavar="ID", type=click.IntRange(min=1, max=_LARGEST), help="Where they go.")
@signing
@click.pass_obj
def merge(dsn: str | None, group_ids: tuple[int, ...], into: int, actor: str | None, reason: str | None) -> None:
    """Make groups that are the same bug one, also for what dies later. Taken back with: groups rules remove."""
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        moved = opened.merge_groups(group_ids, into=into, **signed(operating(opened, actor), reason))
        group = _found(opened, into)
    click.echo(f"group {into} has {moved:,} more letters, {group.dead:,} dead: {group_words.title(group)}", err=True)


@groups.command()
@group_id
@click.argument("condition", metavar="PATH=VALUE")
@click.option("--title", help="What the new group is called.")
@signing
@click.pass_obj
def split(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, group_id: int, condition: str, title: str | None, actor: str | None, reason: str | None
) -> None:
    """Give letters with one value their own group. Also those that die later; prints the id of the new group.

    PATH=VALUE is such as payload.customer.country=DE or headers.source=import. VALUE is JSON, and where it is none a
    text.
    """
    path, equals, text = condition.partition("=")
    if not equals or not path:
        raise NotUnderstood(f"{condition!r} is not PATH=VALUE", "such as payload.customer.country=DE")
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        made = opened.split_group(group_id, path, _value(text), title=title, **signed(operating(opened, actor), reason))
        group = _found(opened, made)
    click.echo(made)
    click.echo(f"group {made} has {group.dead:,} dead letters: {group_words.title(group)}", err=True)


@groups.group(invoke_without_command=True)
@click.option("--queue", help="Only of this queue.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def rules(context: click.Context, queue: str | None, as_json: bool) -> None:
    """List the rules that merge and split have made, or remove one."""
    if context.invoked_subcommand is not None:
        return
    with client(context.obj) as opened:
        found = opened.group_rules(queue)
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no rules: every letter is in the group of its fingerprint", err=True)
    else:
        rows = [[str(rule.id), rule.queue, _says(rule), when(rule.created_at), rule.created_by] for rule in found]
        show_table(["id", "queue", "rule", "made", "by"], rows)


@rules.command()
@click.argument("rule_id", metavar="ID", type=click.IntRange(min=1, max=_LARGEST))
@signing
@click.pass_obj
def remove(dsn: str | None, rule_id: int, actor: str | None, reason: str | None) -> None:
    """Take a merge or a split back. The letters return to where they would be without it."""
    actor, reason = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        opened.remove_rule(rule_id, **signed(operating(opened, actor), reason))
    click.echo(f"rule {rule_id} is removed", err=True)


def _found(opened: Client, group_id: int) -> Group:
    group = opened.group(group_id)
    if group is None:
        raise UnknownGroup(f"there is no group {group_id}", hint="bartleby groups --all lists them")
    return group


def _told(opened: Client, group_id: int) -> Group:
    group = _found(opened, group_id)
    click.echo(group_words.summary(group, datetime.now(UTC)), err=True)
    return group


def _says(rule: GroupRule) -> str:
    if rule.path is None:
        return f"group {rule.from_group} is in {rule.to_group}"
    return f"group {rule.from_group} with {rule.path} = {line(rule.raw, _LONGEST)} is in {rule.to_group}"


def _value(text: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
