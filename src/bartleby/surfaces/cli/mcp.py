"""`bartleby mcp`: tools for agents, over standard input and output or over HTTP."""

import contextlib
import sys
from functools import partial

import click

from bartleby.errors import InvalidSettings
from bartleby.surfaces.cli.confirming import NotUnderstood, actor_of
from bartleby.surfaces.cli.connecting import database, wait_for

_USUAL_BUDGET = 100


@click.command()
@click.option("--http", "address", metavar="HOST:PORT", help="Serve HTTP (/mcp) instead of standard input and output.")
@click.option("--host", "names", multiple=True, metavar="NAME", help="With --http: a name that it is reached by.")
@click.option("--no-auth", is_flag=True, help="With --http on this machine: ask for no tokens.")
@click.option(
    "--actor", envvar="BARTLEBY_ACTOR", help="Whose agent it is; BARTLEBY_ACTOR or your user name if not given."
)
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="Hold the agent to this queue; may be repeated.")
@click.option("--hide", "hidden", multiple=True, metavar="NAME", help="A further field whose values are not shown.")
@click.option(
    "--allow-replay",
    type=click.IntRange(min=1, max=10_000),
    metavar="N",
    help="Let agents run plans of up to N letters without a person's approval.",
)
@click.option(
    "--hourly",
    type=click.IntRange(min=1, max=1_000_000),
    metavar="N",
    help=f"With --allow-replay: how many letters an agent may run in an hour; {_USUAL_BUDGET} if not said.",
)
@click.pass_obj
def mcp(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    address: str | None,
    names: tuple[str, ...],
    no_auth: bool,
    actor: str | None,
    queues: tuple[str, ...],
    hidden: tuple[str, ...],
    allow_replay: int | None,
    hourly: int | None,
) -> None:
    """Serve tools for agents (Model Context Protocol). They look and propose; a person approves what runs."""
    if address is None and (names or no_auth):
        raise NotUnderstood("--host and --no-auth are about HTTP", "--http 127.0.0.1:8765")
    if address is not None and queues and not no_auth:
        raise NotUnderstood(
            "over HTTP a token says which queues", "bartleby tokens add NAME --role agent --queue QUEUE"
        )
    if hourly is not None and (allow_replay is None or hourly < allow_replay):
        raise NotUnderstood("--hourly is a budget for --allow-replay, and at least as much", "--allow-replay 10")
    try:
        from bartleby.surfaces.mcp.door import Address
        from bartleby.surfaces.mcp.running import Terms, run
    except ModuleNotFoundError as error:
        hint = "pip install 'bartleby[mcp]'"
        raise InvalidSettings(f"tools for agents need the package {error.name}", hint=hint) from error
    from bartleby import telemetry
    from bartleby.surfaces.desk.agents import Allowance

    where = None if address is None else Address.of(address, names, authenticate=not no_auth)
    budget = hourly or max(_USUAL_BUDGET, allow_replay or 0)
    allowance = None if allow_replay is None else Allowance(allow_replay, budget)
    terms = Terms(actor_of(actor), queues, hidden, allowance)
    if address is None and sys.stdin.isatty():
        click.echo("this is for a host of agents, which speaks to it over standard streams; Ctrl-C ends it", err=True)
    with database(dsn) as chosen, contextlib.suppress(KeyboardInterrupt):
        if address is not None:  # a server is to come up with its machine; a host of agents is told at once
            telemetry.configure(as_json=False)
            wait_for(chosen)
        run(chosen, terms, where, partial(click.echo, err=True))
