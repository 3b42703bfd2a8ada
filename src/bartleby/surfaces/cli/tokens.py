"""`bartleby tokens`: who may come in by the console, the HTTP API and the tools of agents."""

import re
import sys
import termios
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from bartleby import hashing
from bartleby.client import Client
from bartleby.credentials import Token
from bartleby.errors import BartlebyError
from bartleby.principal import Role
from bartleby.surfaces.cli.confirming import NotUnderstood, asking, reason_of, signing
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.words import line, relative, when

_LARGEST = 2**63 - 1
_LONGEST = 60
_SHORTEST_PASSWORD, _LONGEST_PASSWORD = 8, 1000
_TOKENS_LAST = "90d"
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31557600}


@click.group(invoke_without_command=True)
@click.option("--sessions", is_flag=True, help="Also the sessions that are open.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def tokens(context: click.Context, sessions: bool, as_json: bool) -> None:
    """List who may come in by the console, the HTTP API and the tools of agents; add and revoke tokens."""
    if context.invoked_subcommand is None:
        _list(context.obj, sessions=sessions, as_json=as_json)


@tokens.command("list")
@click.option("--sessions", is_flag=True, help="Also the sessions that are open.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def list_(dsn: str | None, sessions: bool, as_json: bool) -> None:
    """List who may come in, without their secrets."""
    _list(dsn, sessions=sessions, as_json=as_json)


@tokens.command()
@click.argument("name")
@click.option("--role", required=True, type=click.Choice([str(each) for each in Role]), help="What it may do.")
@click.option("--queue", "queues", multiple=True, metavar="QUEUE", help="Only this queue; may be given several times.")
@click.option(
    "--expires",
    metavar="TIME",
    help=f"12h, 90d, 1y, 2027-01-01 or never. If it is not said, a token ends after {_TOKENS_LAST}, a password never.",
)
@click.option("--password", is_flag=True, help="A password to log in with, asked for or read from standard input.")
@signing
@click.option("--json", "as_json", is_flag=True, help="One JSON document, the token in it.")
@click.pass_obj
def add(dsn: str | None, /, name: str, role: str, **given: Any) -> None:  # noqa: ANN401 - click has checked them
    """Let a program in by a token, or a person by a password. NAME is who that is in the audit.

    \b
    reader    looks, at payloads without their secrets
    agent     looks, and proposes replays that a person lets run
    operator  also replays, discards, steers queues and groups, sends, and sees whole payloads
    admin     also sets up queues and sinks, erases, and gives out tokens

    The token is printed this once, on standard output; only a hash of it is kept.
    """  # noqa: D301 - click wants this character
    kind = "password" if given["password"] else "token"
    expires = _expiry(given["expires"] or ("never" if kind == "password" else _TOKENS_LAST), datetime.now(UTC))
    why = reason_of(given["reason"])
    secret = _password() if kind == "password" else hashing.new_token()
    kept = hashing.slow_digest(secret) if kind == "password" else hashing.digest(secret)
    queues = list(given["queues"]) or None
    with client(dsn) as opened:
        by = signed(operating(opened, given["actor"]), why)
        added = opened.add_token(kind, name, kept, role, queues=queues, expires=expires, **by)
        [made] = [each for each in opened.tokens() if each.id == added]
        unknown = set(queues or ()) - {each.name for each in opened.queues()}
    if given["as_json"]:
        show_json({**asdict(made), **({"token": secret} if kind == "token" else {})})
    elif kind == "token":
        click.echo(secret)
    once = "; it is shown this once" if kind == "token" else ""
    click.echo(f"{kind} {added} of {name} is added: {_told(made)}{once}", err=True)
    for each in sorted(unknown):
        click.echo(f"there is no queue {line(each, _LONGEST)} yet", err=True)


@tokens.command()
@click.argument("token_id", metavar="ID", type=click.IntRange(min=1, max=_LARGEST))
@signing
@click.pass_obj
def revoke(dsn: str | None, token_id: int, actor: str | None, reason: str | None) -> None:
    """Let a token, a password or a session in no more, at once; its sessions end with it."""
    why = reason_of(reason)
    with client(dsn) as opened:
        kind, name = _named(opened, token_id)
        opened.revoke_token(token_id, **signed(operating(opened, actor), why))
    click.echo(f"{kind} {token_id}{f' of {name}' if name else ''} is revoked", err=True)


def _named(opened: Client, token_id: int) -> tuple[str, str]:
    found = [each for each in opened.tokens() if each.id == token_id]
    return (found[0].kind, found[0].name) if found else ("token", "")


def _list(dsn: str | None, *, sessions: bool, as_json: bool) -> None:
    with client(dsn) as opened:
        found = [each for each in opened.tokens() if sessions or each.kind != "session"]
    if as_json:
        show_json(found)
    elif not found:
        click.echo("nobody has a token; let somebody in: bartleby tokens add NAME --role reader", err=True)
    else:
        columns = ["id", "kind", "name", "role", "expires", "used", "added by", "queues"]
        show_table(columns, [_row(each) for each in found], fold=True)


def _row(each: Token) -> list[str]:
    def moment(at: datetime | None) -> str:
        if at is None:
            return "never"
        return relative(at, datetime.now(UTC)) if sys.stdout.isatty() else when(at)

    queues = "all" if each.queues is None else ", ".join(each.queues)
    names = line(each.name, _LONGEST), line(each.created_by, _LONGEST)
    return [
        str(each.id),
        each.kind,
        names[0],
        each.role,
        moment(each.expires_at),
        moment(each.used_at),
        names[1],
        queues,
    ]


def _told(made: Token) -> str:
    queues = "all queues" if made.queues is None else ", ".join(made.queues)
    end = "never expires" if made.expires_at is None else f"expires {when(made.expires_at)}"
    return f"{made.role} of {queues}, {end}"


def _expiry(text: str, now: datetime) -> datetime | None:
    said = text.strip().lower()
    if said == "never":
        return None
    try:
        if found := re.fullmatch(r"(\d{1,9})([mhdwy])", said):
            return now + timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        # one without a time zone is in that of whoever types it
        end = datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise NotUnderstood(f"{text!r} is no time", "--expires 12h, 90d, 1y, 2027-01-01 or never") from None
    if end <= now:
        raise NotUnderstood(f"{text!r} is past")
    return end


def _password() -> str:
    """Ask for it twice where somebody can be asked, else read a line; never from an argument, which others can see."""
    if asking():
        password = _hidden("Password: ")
        if _hidden("Once more: ") != password:
            raise BartlebyError("nothing was changed: the two are not the same")
    elif sys.stdin.isatty():
        raise NotUnderstood(
            "there is no terminal to ask on", "let standard input be a file or a pipe with the password"
        )
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not _SHORTEST_PASSWORD <= len(password) <= _LONGEST_PASSWORD or "\0" in password:
        lengths = f"{_SHORTEST_PASSWORD} to {_LONGEST_PASSWORD:,} characters"
        raise BartlebyError(f"nothing was changed: a password has {lengths}")
    return password


def _hidden(question: str) -> str:
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSAFLUSH, silent)
    try:
        click.echo(question, nl=False, err=True)
        said = sys.stdin.readline()
    except KeyboardInterrupt:
        said = ""
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        click.echo(err=True)
    if not said:
        raise BartlebyError("nothing was changed: there was no answer")
    return said.rstrip("\r\n")
