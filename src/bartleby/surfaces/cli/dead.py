"""`bartleby dead`: find dead letters, count them, export them."""

import shutil
import sys
from datetime import UTC, datetime
from itertools import islice

import click

from bartleby.client import Client
from bartleby.evidence import Count, DeadLetter, Page, term
from bartleby.operations import Operator
from bartleby.surfaces.cli.confirming import NotUnderstood, Selecting, Selection, current_user, pointing, what
from bartleby.surfaces.cli.connecting import client
from bartleby.surfaces.cli.exporting import export, show_letters
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.cli.progress import progress
from bartleby.surfaces.words import error_line, printable, relative, when

_A_PAGE = 50
_LARGEST_PAGE = 5000
_COUNTED_UPTO = 1_000_000
_WALKED_UPTO, _WALKED_AT_ONCE = 100_000, 1000
_WIDE, _VERY_WIDE = 100, 130


@click.command(cls=Selecting)
@what
@click.option(
    "--sort",
    type=click.Choice(["newest", "oldest", "id", "-id"]),
    default="newest",
    show_default=True,
    help="By when they became what they are, or by their ids.",
)
@click.option("--limit", type=click.IntRange(1), help=f"At most so many; {_A_PAGE} if not given, in an export all.")
@click.option("--after", metavar="CURSOR", help="Go on where the page before ended.")
@click.option("--count", "only_count", is_flag=True, help="Only how many there are.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--export", "target", metavar="FILE", help="Write all of them to a file; - is standard output.")
@click.option(
    "--format", "form", type=click.Choice(["jsonl", "csv"]), help="Of the export; as FILE is called, else JSON Lines."
)
@click.option("--force", is_flag=True, help="Write over FILE.")
@click.pass_obj
def dead(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    what: tuple[str, ...],
    sort: str,
    limit: int | None,
    after: str | None,
    only_count: bool,
    as_json: bool,
    target: str | None,
    form: str | None,
    force: bool,
) -> None:
    """List dead letters, the newest first.

    WHAT is message ids, or a filter: terms that must all hold.

    \b
      queue:billing  type:KeyError  group:7  key:order-88*  status:discarded
      error:timeout  "no route to host"  -type:ValueError  type:KeyError,IndexError
      'age:>1h'  dead:2026-11-14T03:00..2026-11-14T04:00  'attempts:>=5'
      payload.customer.id:42  headers.tenant:acme  held:yes  replay:12

    Without status: only those that are dead now; status:any means all. Quote > and < for the shell.
    """  # noqa: D301 - click wants this character
    selection = Selection.of(what)
    _check(target, form, after=after, only_count=only_count, as_json=as_json, limit=limit)
    with client(dsn) as opened, pointing(selection):
        if only_count:
            _count(opened, selection, as_json=as_json)
        elif target is not None:
            _export(opened, selection, target, form, sort=sort, limit=limit, force=force)
        else:
            page = _page(opened, selection, limit or _A_PAGE, after, sort)
            _show(opened, selection, page, as_json=as_json, sort=sort, limit=limit, later=after is not None)


def _check(
    target: str | None, form: str | None, *, after: str | None, only_count: bool, as_json: bool, limit: int | None
) -> None:
    if target is not None and (after is not None or only_count or as_json):
        raise NotUnderstood("--export writes all letters to a file: it goes with neither --after, --count nor --json")
    if target is None and form is not None:
        raise NotUnderstood("--format says how an export is written", "--export FILE")
    if target is None and limit is not None and limit > _LARGEST_PAGE:
        raise NotUnderstood(f"a page has at most {_LARGEST_PAGE:,} letters", "--export FILE writes all of them")


def _count(opened: Client, selection: Selection, *, as_json: bool) -> None:
    count = opened.count_letters(selection.as_filter, most=_COUNTED_UPTO)
    if not count.exact and count.letters < _WALKED_UPTO:
        count = _counted(opened, selection)
    if as_json:
        show_json(count)
    elif sys.stdout.isatty():
        click.echo(count)
    else:
        click.echo(f"{count.letters}{'' if count.exact else '+'}")


def _counted(opened: Client, selection: Selection) -> Count:
    # A search that looked at many in vain ended early: it is gone on with, where it was.
    letters, after = 0, None
    with progress("counting", None) as tell:
        while letters < _WALKED_UPTO:
            page = opened.dead_letters(selection.as_filter, limit=_WALKED_AT_ONCE, after=after, sort="id")
            letters, after = letters + len(page), page.next
            tell(letters)
            if page.complete:
                return Count(letters, exact=True)
    return Count(letters, exact=False)


def _export(
    opened: Client, selection: Selection, target: str, form: str | None, *, sort: str, limit: int | None, force: bool
) -> None:
    form = form or ("csv" if target.lower().endswith(".csv") else "jsonl")
    count = opened.count_letters(selection.as_filter)
    total = min(count.letters, limit or count.letters) if count.exact else limit
    letters = islice(Operator(opened, current_user()).letters(selection.as_filter, sort=sort), limit)
    written = export(letters, target, form, force=force, total=total)
    click.echo(f"{written:,} letters{'' if target == '-' else f' in {printable(target)}'}", err=True)


def _page(opened: Client, selection: Selection, limit: int, after: str | None, sort: str) -> Page[DeadLetter]:
    # A search that looked at many in vain ends early: it is gone on with until the page is full.
    found: list[DeadLetter] = []
    while True:
        page = opened.dead_letters(selection.as_filter, limit=limit - len(found), after=after, sort=sort)
        found += page
        after = page.next
        if page.complete or len(found) >= limit:
            return Page(tuple(found), after)


def _show(
    opened: Client,
    selection: Selection,
    page: Page[DeadLetter],
    *,
    as_json: bool,
    sort: str,
    limit: int | None,
    later: bool,
) -> None:
    if as_json:
        show_letters(page)
    elif page.items:
        _table(page.items)
    if not page.items:
        _explain_nothing(opened, selection, later=later)
    _hint_at_queue(opened, selection)
    if page.items and not page.complete:
        count = opened.count_letters(selection.as_filter)
        options = ("" if sort == "newest" else f" --sort {sort}") + (f" --limit {limit}" if limit else "")
        words = " ".join(filter(None, ("bartleby dead", selection.words)))
        if count.letters < len(page):  # it was given up sooner than the page was full
            count = Count(len(page), exact=False)
        shown = f"{len(page):,}{' more' if later else ''} of {count}"
        click.echo(printable(f"{shown}; next page: {words}{options} --after {page.next}"), err=True)
        if not selection.words and not later:
            click.echo("hint: bartleby groups shows of how many bugs they died", err=True)


def _table(letters: tuple[DeadLetter, ...]) -> None:
    rows = [_row(letter) for letter in letters]
    # a program finds them at the same place, whatever there is to show
    shown = _columns_for(letters, shutil.get_terminal_size().columns) if sys.stdout.isatty() else list(rows[0])
    show_table(shown, [[row[column] for column in shown] for row in rows])


def _columns_for(letters: tuple[DeadLetter, ...], width: int) -> list[str]:
    columns = ["message", "queue"]
    if any(letter.status != "dead" or letter.held_at is not None for letter in letters):
        columns.append("status")
    if width >= _WIDE:
        columns += ["reason", "attempts"]
    if any(letter.cycle > 1 for letter in letters):
        columns.append("cycle")
    columns.append("group")
    if width >= _VERY_WIDE and any(letter.key is not None for letter in letters):
        columns.append("key")
    return [*columns, "dead at", "error"]


def _row(letter: DeadLetter) -> dict[str, str]:
    terminal = sys.stdout.isatty()
    none = "" if terminal else "-"
    return {
        "message": str(letter.message_id),
        "queue": letter.queue,
        "status": letter.status + (", held" if letter.held_at is not None else ""),
        "reason": letter.reason,
        "attempts": str(letter.attempts),
        "cycle": str(letter.cycle),
        "group": none if letter.group_id is None else str(letter.group_id),
        "key": none if letter.key is None else letter.key,
        "dead at": relative(letter.dead_at, datetime.now(UTC)) if terminal else when(letter.dead_at),
        "error": error_line(letter.error_type, letter.error) + (" (erased)" if letter.erased_at is not None else ""),
    }


def _explain_nothing(opened: Client, selection: Selection, *, later: bool) -> None:
    if later:
        click.echo("no more letters", err=True)
    elif selection.ids is not None:
        ids = ", ".join(map(str, selection.ids))
        click.echo(f"no letter of message {ids}; what became of it: bartleby explain {selection.ids[0]}", err=True)
    elif not selection.filter:
        click.echo("no dead letters", err=True)
    else:
        click.echo(f"no dead letter matches: {printable(selection.filter)}", err=True)
        others = None if selection.mentions("status") else opened.count_letters(selection.but("status:any").as_filter)
        if others is not None and others.letters:
            click.echo(f"hint: {others} that are not dead any more do: add status:any", err=True)


def _hint_at_queue(opened: Client, selection: Selection) -> None:
    words = {word for word in selection.filter.split() if ":" not in word}
    for name in sorted(words & {each.name for each in opened.queues()} if words else ()):
        hint = f"{name} was looked for in the error texts; for the queue say {term('queue', name)}"
        click.echo(f"hint: {hint}", err=True)
