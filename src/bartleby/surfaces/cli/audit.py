"""`bartleby audit`: what operators did, and whether somebody has tampered with the record of it."""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

import click

from bartleby.evidence import AuditLine
from bartleby.surfaces.cli.connecting import client
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.words import line, relative, when

_LONGEST = 200
_LONGEST_VALUE = 60
_LONGEST_NAME = 24
_MOST_RANGES = 3
_SUBJECTS = {"queue": "queue", "group_id": "group", "replay_id": "replay"}


@click.group(invoke_without_command=True)
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True)
@click.option("--before", "before_id", type=int, metavar="ID", help="Only lines before this one: the next page.")
@click.option("--actor", help="Only what this person did.")
@click.option("--action", metavar="ACTION", help="Only such as letter.discard, group.resolve or replay.start.")
@click.option("--request-id", help="Only what belongs to this request.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, with what was changed before and after.")
@click.pass_context
def audit(  # noqa: PLR0917 - click passes them by name
    context: click.Context,
    limit: int,
    before_id: int | None,
    actor: str | None,
    action: str | None,
    request_id: str | None,
    as_json: bool,
) -> None:
    """List what operators did. The newest comes first; `verify` tells whether somebody has changed the record of it."""
    if context.invoked_subcommand is not None:
        return
    with client(context.obj) as opened:
        lines = opened.audit_log(
            limit=limit + 1, before_id=before_id, actor=actor, action=action, request_id=request_id
        )
    found = lines[:limit]
    if as_json:
        show_json(found)
    elif not found:
        click.echo("nothing was done yet" if before_id is None else "nothing was done before that", err=True)
    else:
        users = {each.db_user for each in found}
        show_table(["id", "when", "who", "what", "to what, and why"], [_row(each, users) for each in found], fold=True)
    if len(lines) > len(found):
        click.echo(f"there is more: --before {found[-1].id}", err=True)


@audit.command()
@click.option("--anchor", metavar="ID:HASH", help="What `bartleby audit anchor` said at an earlier time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def verify(dsn: str | None, anchor: str | None, as_json: bool) -> None:
    """Look for lines that were changed, deleted, moved or slipped in. Ends with 1 if there are any.

    Without an anchor, one who can write to every table could have rewritten all of it, or cut off its end.
    """
    with client(dsn) as opened:
        problems = opened.verify_audit(anchor)
        end = opened.audit_anchor() if not problems else None
    if as_json:
        show_json(problems)
    for each in problems if not as_json else ():
        click.echo(f"line {each.id}: {line(each.problem, _LONGEST)}" if each.id is not None else each.problem)
    if problems:
        click.echo(f"the audit was tampered with in {_places(len(problems))}", err=True)
        raise SystemExit(1)
    proof = "" if anchor else "; give it an earlier anchor to be sure of the end too"
    click.echo(f"all {int((end or '0:').partition(':')[0]):,} lines are as they were written{proof}", err=True)


@audit.command("anchor")
@click.pass_obj
def anchor_(dsn: str | None) -> None:
    """Print where the audit ends now. Keep it outside of this database, for `bartleby audit verify --anchor`."""
    with client(dsn) as opened:
        click.echo(opened.audit_anchor())


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count:,} places"


def _row(each: AuditLine, users: set[str]) -> list[str]:
    moment = relative(each.at, datetime.now(UTC)) if sys.stdout.isatty() else when(each.at)
    # who it was for the database is of interest only where there are several
    actor = each.actor if each.actor == each.db_user or len(users) == 1 else f"{each.actor} (as {each.db_user})"
    change = _change(each.before, each.after)
    subject = line(f"{_subject(each.subject)}{f', {change}' if change else ''}", _LONGEST)
    why = f": {line(each.reason, _LONGEST)}" if each.reason else ""
    longest = _LONGEST_NAME if sys.stdout.isatty() else _LONGEST
    return [str(each.id), moment, line(actor, longest), each.action, f"{subject}{why}"]


def _subject(subject: Mapping[str, object]) -> str:
    words = []
    for key, value in subject.items():
        if key in _SUBJECTS:
            words.append(f"{_SUBJECTS[key]} {value}")
        elif key == "message_ids":
            words.append(_messages(str(value)))
        elif key == "group_ids" and isinstance(value, list):
            words.append(f"groups {', '.join(map(str, value))}")
        else:
            words.append(f"{key} {_text(value)}")
    return ", ".join(words)


def _messages(ranges: str) -> str:
    """Return `{[3,6),[9,10)}` as `messages 3-5, 9`."""
    found = []
    for part in ranges.strip("{}").replace("),", ")|").split("|"):
        first, _, end = part.strip("[)").partition(",")
        if not end:
            return f"messages {ranges}"
        found.append(first if int(end) == int(first) + 1 else f"{first}-{int(end) - 1}")
    more = f" and {len(found) - _MOST_RANGES:,} more" if len(found) > _MOST_RANGES else ""
    plural = "s" if len(found) > 1 or "-" in found[0] else ""
    return f"message{plural} {', '.join(found[:_MOST_RANGES])}{more}"


def _change(before: object, after: object) -> str:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    # the note of a group is the reason of the line
    both = [key for key in after if key in before and before[key] != after[key] and key != "note"]
    changed = [f"{key} {_text(before[key])} → {_text(after[key])}" for key in both]
    return ", ".join(changed)


def _text(value: object) -> str:
    return line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _LONGEST_VALUE)
