"""`bartleby erase`: for those who ask that nothing about them is kept."""

import sys
from typing import Any

import click

from bartleby.errors import BartlebyError
from bartleby.evidence import term
from bartleby.operations import Operator
from bartleby.surfaces.cli.confirming import NotUnderstood, acting, asking, confirm, pointing, reason_of
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.deeds import letters, sample
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.progress import Stop, interrupts

_MOST_SHOWN = 1_000_000
# as many as the core erases in one transaction
_AT_ONCE = 100_000
_IN_PART = 3


@click.command()
@click.option("--key", required=True, help="Of the letters that are erased.")
@click.option("--queue", help="Only in this queue.")
@acting
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def erase(dsn: str | None, /, key: str, queue: str | None, **given: Any) -> None:  # noqa: ANN401 - click has checked them
    """Erase what letters say about a key, for good.

    Payload, headers, key and error texts go, also those of letters on hold; types, counts and times stay. For those who
    ask that nothing about them is kept.
    """
    if not key:
        raise NotUnderstood("--key is empty")
    filter = " ".join([term("key", key), "status:any", *([] if queue is None else [term("queue", queue)])])
    stop = Stop()
    with client(dsn) as opened, pointing(filter):
        operator = operating(opened, given["actor"])
        ids = opened.letter_ids(filter, most=_MOST_SHOWN)
        if not ids:
            raise BartlebyError(
                f"no letter has the key {key!r}", hint="keys are matched whole, upper and lower case apart"
            )
        reason = given["reason"] if asking() and given["reason"] is None else reason_of(given["reason"])
        facts = {
            "erased": "payload, headers, key, error texts and tracebacks, of earlier cycles too: they do not come back",
            "kept": "error types, counts, times; a message that is alive keeps its payload until it is done",
            "letters": sample(opened, ids),
        }
        confirm("Erase", len(ids), f"of key {key}", yes=given["yes"], facts=facts, typed=key)
        with interrupts(stop, lambda: "stopping; Ctrl-C again leaves at once"):
            erased, complete = _erase(operator, key, queue, reason_of(reason), stop)
    if given["as_json"]:
        show_json({"erased": erased})
    else:
        click.echo(f"{letters(erased)} erased")
    if not complete:
        click.echo("stopped; there are more: say it again for the rest", err=True)
        sys.exit(_IN_PART)


def _erase(operator: Operator, key: str, queue: str | None, reason: str, stop: Stop) -> tuple[int, bool]:
    """Erase until nothing is left, or until told to stop; return how many letters, and whether that is all of them."""
    total = 0
    try:
        while True:
            erased = operator.client.erase_key(key, queue=queue, **signed(operator, reason))
            total += erased
            if erased < _AT_ONCE:
                return total, True
            if stop.is_set():
                return total, False
    except KeyboardInterrupt:
        problem = f"left at once: {letters(total)} erased, and those that were being erased are uncertain"
        raise BartlebyError(problem, hint="say it again for the rest") from None
