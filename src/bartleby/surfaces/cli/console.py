"""The command `bartleby console`: the console and the HTTP API, served by itself."""

import contextlib
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from bartleby.errors import BartlebyError, InvalidSettings
from bartleby.surfaces.cli.connecting import database
from bartleby.surfaces.listening import is_local, listening, serve

if TYPE_CHECKING:
    from bartleby.surfaces.web.configuring import Serving

_HOW = "add a token: bartleby tokens add NAME --role operator"


@click.command()
@click.option("--host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 for any that is free.  [default: 8467]")
@click.option("--prefix", help="The path that a proxy has it under.")
@click.option("--auth/--no-auth", "authenticate", default=None, help="Whether people say who they are; beyond this"
              " machine they always do.")  # fmt: skip
@click.option("--proxy", "proxy_networks", multiple=True, metavar="NETWORK", help="Believe a proxy from there.")
@click.option("--proxy-user-header", metavar="HEADER", help="Where the proxy says who it is; '' if it"
              " knows nobody.")  # fmt: skip
@click.option("--proxy-roles-header", metavar="HEADER", help="Where the proxy says what they are.")
@click.option("--proxy-role", "proxy_roles", multiple=True, metavar="WORD=ROLE", help="What such a word means here.")
@click.option("--proxy-default-role", metavar="ROLE", help="What everybody else is.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A further name that it is called by.")
@click.option("--origin", "origins", multiple=True, metavar="URL", help="A site whose pages may change things.")
@click.option("--hide", "hidden", multiple=True, metavar="FIELD", help="A field of payloads that is not shown.")
@click.option("--environment", metavar="NAME", help="What this is, such as production; every page says it.")
@click.pass_obj
def console(dsn: str | None, /, **given: Any) -> None:  # noqa: ANN401 - click has checked them
    """Serve the console and the HTTP API.

    On this machine everybody comes in who can reach it. Beyond it, people need a token, a password, or a proxy that
    knows them; see `bartleby tokens`. What is not given here can be in BARTLEBY_CONSOLE_* or in the table [console] of
    bartleby.toml. Ctrl-C ends it.
    """
    try:
        from bartleby.surfaces.web import configuring
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            f"the console needs packages that are not installed: {error.name}", hint="pip install 'bartleby[web]'"
        ) from None
    given["proxy_roles"] = ",".join(given["proxy_roles"])
    serving = configuring.load(given)
    with database(dsn) as target:
        _serve(target, serving)


def _serve(dsn: str, serving: "Serving") -> None:
    from bartleby.surfaces import web

    local = is_local(serving.host)
    authenticate = serving.authenticate
    if authenticate is None:
        authenticate = not local or serving.settings.proxy is not None
    _require_a_door(dsn, serving, local=local, authenticate=authenticate)
    with listening(serving.host, serving.port, option="--port") as opened:
        app = web.console(dsn, replace(serving.settings, authenticate=authenticate))
        with contextlib.suppress(KeyboardInterrupt):
            serve(app, opened, partial(_announce, opened, serving, local=local, authenticate=authenticate))
    click.echo("stopped", err=True)


def _require_a_door(dsn: str, serving: "Serving", *, local: bool, authenticate: bool) -> None:
    if local:
        return
    if not authenticate:
        raise InvalidSettings(
            f"{serving.host} is beyond this machine, and there nobody comes in without saying who they are",
            hint=f"leave out --no-auth; {_HOW}",
        )
    proxy = serving.settings.proxy
    if (proxy is None or proxy.user_header is None) and _nobody_could_come_in(dsn):
        raise InvalidSettings(
            f"{serving.host} is beyond this machine, and nobody has a token or a password to come in with", hint=_HOW
        )


def _nobody_could_come_in(dsn: str) -> bool:
    import psycopg

    from bartleby.client import Runner

    try:
        with psycopg.connect(dsn, connect_timeout=2, autocommit=True) as connection:
            return all(each.kind == "session" for each in Runner(connection).tokens())
    except (psycopg.Error, BartlebyError):
        return False  # it is away, or may not be asked that; whoever comes is asked then


def _announce(opened: socket.socket, serving: "Serving", *, local: bool, authenticate: bool) -> None:
    host, port = opened.getsockname()[:2]
    name = {"0.0.0.0": "localhost", "::": "localhost", "127.0.0.1": "localhost"}.get(host, host)  # noqa: S104
    shown = f"[{name}]" if ":" in name else name
    click.echo(f"http://{shown}:{port}{serving.settings.prefix}/")
    if not authenticate:
        may = "may do what its database user may"
        click.echo(f"whoever is on this machine comes in, and {may}; --auth asks who they are", err=True)
    if not local and serving.settings.proxy is None:
        click.echo("what people send goes over the network as it is: put a proxy with TLS in front (--proxy)", err=True)
    click.echo("Ctrl-C ends it", err=True)
