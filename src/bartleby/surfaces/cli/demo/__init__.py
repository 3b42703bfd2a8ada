"""`bartleby demo`: a shop at work on a PostgreSQL of its own, and everything that goes wrong in it."""

import click


@click.command()
@click.option("--seconds", type=click.FloatRange(1, 3600), default=36, show_default=True, help="How long the show is.")
@click.option("--keep/--no-keep", default=None, help="Afterwards go on until Ctrl-C; the default on a terminal.")
@click.option("--console/--no-console", "console", default=True, help="The console, beside the show; the default.")
def demo(seconds: float, keep: bool | None, *, console: bool) -> None:
    """Watch a shop fail and recover. On a PostgreSQL of its own, which leaves nothing behind."""
    from bartleby.surfaces.cli.demo.show import run

    run(seconds, keep=keep, console=console)
