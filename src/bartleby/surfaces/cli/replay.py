"""`bartleby replay WHAT…`: let dead letters live again, by a plan that is shown before it runs."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psycopg

from bartleby.client import Client, Runner
from bartleby.errors import BartlebyError, InvalidPatch
from bartleby.evidence import ReplayId
from bartleby.operations import Operator
from bartleby.surfaces.cli import replay_control, replay_list
from bartleby.surfaces.cli.confirming import (
    Selecting,
    Selection,
    acting,
    actor_of,
    confirm,
    pointing,
    reason_of,
    selecting,
)
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.progress import progress
from bartleby.surfaces.cli.replay_preview import Preview, document, reasons, show, to_replay

if TYPE_CHECKING:
    from bartleby.app import Bartleby

_CANARY = 10
_WITH_CANARY = 100
_MAKE = "WHAT..."


class _Number(click.FloatRange):
    """A number in a range, in which nan is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        number = float(super().convert(value, param, ctx))
        return self.fail(f"{value} is not a number", param, ctx) if math.isnan(number) else number


class _Making(Selecting):
    """The command that has no name of its own."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path.rstrip(), " ".join(self.collect_usage_pieces(ctx)))


class _Plans(click.Group):
    """A group whose first word, unless it is one of its commands, begins the selection of a new plan."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, "-h", "--help"} - {_MAKE}
        return super().parse_args(ctx, args if args and args[0] in known else [_MAKE, *args])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == _MAKE else name, command, rest

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with click.Context(self.commands[_MAKE], info_name="", parent=ctx) as made:
            self.commands[_MAKE].format_help(made, formatter)
        self.format_commands(ctx, formatter)


@click.group(cls=_Plans, add_help_option=True)
def replay() -> None:
    """Let dead letters live again."""


@dataclass(frozen=True, slots=True)
class _Given:
    """What the command line says about a plan."""

    selection: Selection
    everything: bool
    options: dict[str, Any]
    app: "Bartleby | None"
    json: bool


@replay.command(_MAKE, cls=_Making, hidden=True)
@selecting
@acting
@click.option("--to", metavar="QUEUE", help="Into another queue.")
@click.option("--patch", metavar="FILE|JSON", help="JSON Patch of every payload; the originals are kept. - is stdin.")
@click.option("--generation", type=click.IntRange(min=0), metavar="N", help="With another generation.")
@click.option("--rate", type=_Number(min=0.001, max=1e6), metavar="N", help="At most so many a second.")
@click.option("--window", type=click.IntRange(1, 10**9), metavar="N", help="At most so many alive at once.")
@click.option(
    "--canary",
    type=click.IntRange(1, 10**6),
    metavar="K",
    help=f"So many first; the rest only if they do not die again. {_CANARY} where more than {_WITH_CANARY} are meant.",
)
@click.option("--no-canary", is_flag=True, help="All at once.")
@click.option("--tolerance", type=_Number(0, 1), metavar="SHARE", help="The share that may die again.  [default: 0.1]")
@click.option(
    "--app", metavar="MODULE:APP", help="Try the payloads on its handlers before, and skip what does not fit."
)
@click.option("--dry-run", is_flag=True, help="Show the plan; change nothing.")
@click.option("--detach", is_flag=True, help="Start it and leave it to the workers.")
@click.option("--json", "as_json", is_flag=True, help="The plan as one JSON document, at the end.")
@click.pass_obj
def make(
    dsn: str | None,
    /,
    what: tuple[str, ...],
    everything: bool,
    dry_run: bool,
    detach: bool,
    **given: Any,  # noqa: ANN401 - options of a plan
) -> None:
    """Let dead letters live again, under their ids and with new attempts.

    WHAT is message ids or a filter, as of `bartleby dead`. The letters are frozen into a plan, the plan is shown, and
    it runs after a yes, in this terminal or, should that go away, in any worker. Ctrl-C pauses it.
    """
    selection = Selection.of(what, everything=everything)
    selection.meant(everything)
    asked = _Given(selection, everything, _options(given), _app(given["app"]), given["as_json"])
    if given["no_canary"] and given["canary"] is not None:
        raise click.UsageError("--canary and --no-canary contradict each other")
    actor, reason = actor_of(given["actor"]), "dry run" if dry_run else reason_of(given["reason"])
    with client(dsn) as opened:
        operator = operating(opened, actor)
        _add_canary(opened, asked, no_canary=given["no_canary"])
        made = _planned(operator, asked, reason, preview=dry_run)
        if dry_run:
            with _forgetting(opened, made):
                _show_only(_previewed(operator, made, asked), as_json=asked.json)
            return
        with _dropping(operator, made):
            preview = _previewed(operator, made, asked)
            _agree(preview, yes=given["yes"], as_json=asked.json)
        replay_control.begin(operator, preview.plan, reason=reason, detach=detach, as_json=asked.json)


def _planned(operator: Operator, asked: _Given, reason: str, *, preview: bool) -> ReplayId:
    ids, filter = asked.selection.ids, asked.selection.filter
    with pointing(asked.selection):
        return operator.client.plan_replay(
            filter if ids is None else None,
            ids=ids,
            everything=asked.everything,
            preview=preview,
            **asked.options,
            **signed(operator, reason),
        )


def _previewed(operator: Operator, made: ReplayId, asked: _Given) -> Preview:
    unchecked = 0 if asked.app is None else _check(operator, made, asked.app)
    return Preview.of(operator.client, operator.plan(made), unchecked=unchecked)


def _check(operator: Operator, made: ReplayId, app: "Bartleby") -> int:
    total = operator.plan(made).will_run
    with progress("trying payloads", total) as show:
        found = operator.check_patched(
            made, app.handlers, recorder=app.recorder(), on_progress=lambda done, _total: show(done)
        )
    return found.unchecked


def _agree(preview: Preview, *, yes: bool, as_json: bool) -> None:
    plan = preview.plan
    count = to_replay(plan)
    if not count and plan.items == 1:
        raise BartlebyError(f"not replayed: {reasons(preview.obstacles, 1).removeprefix('1 ')}")
    if plan.items > 1:
        show(preview)
    if not count:
        raise BartlebyError("nothing was changed: none of these letters would be replayed")
    if plan.needs_approval:
        if as_json:
            show_json(document(plan))
        raise replay_control.Unapproved(plan)
    of = f"of queue {preview.queue}" if preview.queue else ""
    confirm("Replay", count, of, yes=yes)


def _show_only(preview: Preview, *, as_json: bool) -> None:
    if as_json:
        show_json({**preview.document(), "id": None, "hash": None})
        return
    show(preview, err=False)
    if preview.plan.needs_approval:
        click.echo("somebody else would have to approve it", err=True)
    click.echo("nothing was changed", err=True)


@contextmanager
def _forgetting(opened: Client, made: ReplayId) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(BartlebyError, psycopg.Error):  # else the upkeep forgets it, in an hour
            opened.drop_preview(made)


@contextmanager
def _dropping(operator: Operator, made: ReplayId) -> Iterator[None]:
    """Drop a draft that nobody agreed to; one that waits for somebody else stays."""
    try:
        yield
    except replay_control.Unapproved:
        raise
    except BaseException:
        with suppress(BartlebyError, psycopg.Error):
            operator.client.cancel_replay(made, **signed(operator, "it was not agreed to"))
        raise


def _add_canary(runner: Runner, asked: _Given, *, no_canary: bool) -> None:
    if asked.options["canary"] is not None or no_canary:
        return
    chosen = asked.selection
    if chosen.ids is not None:
        many = len(chosen.ids) > _WITH_CANARY
    else:
        with pointing(chosen):
            found = runner.count_letters(chosen.filter, most=_WITH_CANARY + 1)
        # a count that was given up says nothing about how many there are
        many = found.letters > _WITH_CANARY or not found.exact
    if many:
        asked.options["canary"] = _CANARY


def _options(given: dict[str, Any]) -> dict[str, Any]:
    names = ("to", "generation", "rate", "window", "canary", "tolerance")
    patch = given["patch"]
    return {**{name: given[name] for name in names}, "patch": None if patch is None else _patch(patch)}


def _patch(given: str) -> Any:  # noqa: ANN401 - the core says what a patch is
    text = given
    try:
        if given == "-":
            text = sys.stdin.read()
        elif not given.lstrip().startswith(("[", "{")):
            text = Path(given).read_text(encoding="utf-8")
        return json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPatch(f"the patch cannot be read: {error}", hint="a file, or a JSON array of operations") from None
    except (ValueError, RecursionError) as error:
        raise InvalidPatch(f"the patch is not JSON: {error}") from None


def _app(path: str | None) -> "Bartleby | None":
    if path is None:
        return None
    from bartleby.surfaces.cli.work import load

    return load(path)


for command in (
    replay_list.list_,
    replay_list.show_,
    replay_list.items,
    replay_control.start,
    replay_control.watch,
    replay_control.pause,
    replay_control.resume,
    replay_control.cancel,
    replay_control.approve,
):
    replay.add_command(command)
