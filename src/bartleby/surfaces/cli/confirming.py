"""What every deed of an operator shares: which letters are meant, who does it and why, and the question before it.

    @click.command(cls=Selecting)      # lets -type:KeyError through, which click would take for options
    @selecting                         # WHAT… and --all
    @acting                            # --actor, --reason, --yes
    def discard(…):
        selection = Selection.of(what, everything=everything)
        …
        confirm("Discard", len(ids), yes=yes, facts=…)

Nothing here changes anything.
"""

import getpass
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from bartleby.errors import BartlebyError, InvalidFilter
from bartleby.message import MessageId
from bartleby.surfaces.words import printable

F = TypeVar("F", bound=Callable[..., Any])

_ASKED_UPTO = 100
_LARGEST_ID = 2**63 - 1
# An argument such as -type:KeyError, marked so that click does not take it for options.
_MARK = "\0"
# The fields of a filter whose values may have blanks in them, also those below which anything may be named; then those
# of which a blank ends the value.
TEXTS = ("error", "key", "worker", "version")
PATHS = ("payload", "headers")
WORDS = (
    *("queue", "status", "group", "type", "id", "reason", "age", "dead", "attempts", "cycle", "generation", "held"),
    *("edited", "erased", "replay", "fingerprint"),
)


def _fields(*names: str) -> re.Pattern[str]:
    paths = (rf'{name}\.[^\s:"]*' for name in PATHS)
    return re.compile(rf"-?(?:{'|'.join((*names, *paths))}):", re.IGNORECASE)


_FIELD = _fields(*WORDS, *TEXTS)
_OF_TEXT = _fields(*TEXTS)
_LIKE_A_FIELD = re.compile(r"-?[A-Za-z][\w.-]*:\S")
_TOKEN = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\S)+')
_LISTS = {"queue": "bartleby queues lists them", "group": "bartleby groups lists them"}
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


class NotUnderstood(click.ClickException):
    """The command was not understood: what, and what to say instead. Ends with 2."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:  # noqa: ANN401, ARG002 - as click declares it
        """Print it as every other error is printed."""
        click.echo(f"bartleby: {printable(self.message)}", err=True)
        if self.hint:
            click.echo(f"hint: {printable(self.hint)}", err=True)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant: those of the ids, else those that a filter finds, and an empty one finds all dead."""

    filter: str = ""
    ids: tuple[MessageId, ...] | None = None

    @classmethod
    def of(cls, words: Sequence[str], *, everything: bool = False) -> "Selection":
        """Return what the words of a command mean: ids if all are numbers, else one filter."""
        if everything and words:
            raise NotUnderstood("--all means every letter, and a selection was given as well", "leave one of them out")
        if words and all(word.isascii() and word.isdigit() for word in words):
            ids = tuple(dict.fromkeys(MessageId(int(word)) for word in words))
            if max(ids) > _LARGEST_ID:
                raise NotUnderstood(f"no message has such an id: {max(ids)}")
            return cls(ids=ids)
        return cls(" ".join(filter(None, map(_term, words))))

    @property
    def as_filter(self) -> str:
        """The filter that finds them; ids whatever has become of them."""
        return self.filter if self.ids is None else f"id:{','.join(map(str, self.ids))} status:any"

    @property
    def words(self) -> str:
        """What to type for them in a shell."""
        return shlex.join(map(str, self.ids) if self.ids is not None else _TOKEN.findall(self.filter))

    def meant(self, everything: bool) -> None:
        """Refuse to take nothing for everything."""
        if not self.filter and self.ids is None and not everything:
            raise NotUnderstood(
                "which letters? Say a filter or message ids",
                "such as queue:billing type:KeyError; to mean all there are, say --all",
            )

    def mentions(self, field: str) -> bool:
        """Return whether the filter says something about a field."""
        return re.search(rf"(?:^|\s)-?{field}:", _QUOTED.sub('""', self.filter), re.IGNORECASE) is not None

    def but(self, term: str) -> "Selection":
        """Return the selection with one more term; ids stay as they are."""
        return self if self.ids is not None else Selection(f"{self.filter} {term}".strip())


def _term(word: str) -> str:
    # The shell took the quotes away: error:"no route" arrives as one word with a blank in it.
    word = word.strip()
    if not re.search(r"\s", word) or '"' in word:
        return word
    field = _OF_TEXT.match(word)
    head, text = (field[0], word[field.end() :]) if field else ("", word)
    several = any(_FIELD.match(part) or part.startswith("-") for part in text.split())
    if field is None:
        several = several or _LIKE_A_FIELD.match(text) is not None
    escaped = text.replace("\\", "\\\\")
    return word if several else f'{head}"{escaped}"'


@contextmanager
def pointing(selection: Selection | str) -> Iterator[None]:
    """Show where a filter is wrong."""
    filter = selection if isinstance(selection, str) else selection.as_filter
    try:
        yield
    except InvalidFilter as error:
        place = "\n".join(f"  {line}" for line in error.pointed(filter).splitlines())
        hint = error.hint or ""
        if hint.startswith("see: "):  # the SQL core words its hints for psql
            hint = _LISTS.get(_field_at(filter, error.position), hint)
        if re.search(r":(?:\s|$)", filter):
            hint = f"{hint}; a shell takes > and < for itself: quote them, as in 'age:>1h'"
        raise NotUnderstood(f"{error}\n{place}", hint) from None


def _field_at(filter: str, position: int | None) -> str:
    terms = [each[0] for each in _TOKEN.finditer(filter) if each.start() < (position or 0)]
    return terms[-1].removeprefix("-").partition(":")[0].lower() if terms else ""


class Selecting(click.Command):
    """A command with WHAT…, where a word with one dash before it is a negated term."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let click see options only where there are options."""
        return super().parse_args(ctx, shielded(self.params, args))


def shielded(params: Sequence[click.Parameter], args: Sequence[str]) -> list[str]:
    """Return the words of a command with negated terms marked, as `what` takes them."""
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"-h"}
    valued = {name for param in params if isinstance(param, click.Option) and not param.is_flag for name in param.opts}
    words: list[str] = []
    taken, ended = False, False
    for word in args:
        negated = word.startswith("-") and not word.startswith("--") and word not in known and len(word) > 1
        words.append(_MARK + word if negated and not taken and not ended else word)
        taken = not taken and not ended and word in valued
        ended = ended or word == "--"
    return words


def _unmarked(_context: click.Context, _parameter: click.Parameter, words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.removeprefix(_MARK) for word in words)


what = click.argument("what", nargs=-1, metavar="[WHAT]...", callback=_unmarked)


def selecting(function: F) -> F:
    """Give a deed its letters: WHAT… and --all."""
    function = click.option("--all", "everything", is_flag=True, help="All that there are, in every queue.")(function)
    return what(function)


def acting(function: F) -> F:
    """Give a deed --actor, --reason and --yes."""
    function = click.option("--yes", is_flag=True, help="Do not ask; for scripts.")(function)
    return signing(function)


def signing(function: F) -> F:
    """Give a deed that asks no question --actor and --reason."""
    function = click.option("--reason", help="Why; it is recorded. Asked for if it is not given.")(function)
    who = "Who; BARTLEBY_ACTOR or your user name if not given."
    return click.option("--actor", envvar="BARTLEBY_ACTOR", help=who)(function)


def actor_of(given: str | None) -> str:
    """Return in whose name it is done."""
    if given is not None:
        if not given.strip():
            raise NotUnderstood("--actor is empty: say who does it")
        return given.strip()
    return current_user()


def current_user() -> str:
    """Return the name of the account that runs this."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container an account need not have a name
        return f"user {os.getuid()}"


def reason_of(given: str | None) -> str:
    """Return why it is done; ask for it if there is somebody to ask."""
    if given is None and asking():
        given = answer("Reason (it is recorded): ")
    if given is None:
        raise NotUnderstood("the reason is missing, and it is recorded", "--reason 'why this is right'")
    if not given.strip():
        raise NotUnderstood("the reason is empty, and it is recorded", "--reason 'why this is right'")
    return given.strip()


def asking() -> bool:
    """Return whether there is somebody who sees a question and can answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def answer(question: str) -> str:
    """Ask, on standard error so that no question is taken for data; return the answer."""
    try:
        click.echo(printable(question), nl=False, err=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if not line:  # Ctrl-C, or Ctrl-D
        click.echo(err=True)
        raise BartlebyError("nothing was changed: there was no answer")
    return line.strip()


def confirm(
    verb: str,
    count: int,
    of: str = "",
    noun: str = "letter",
    *,
    yes: bool,
    facts: Mapping[str, str] | None = None,
    typed: str | None = None,
    alternative: str = "",
) -> None:
    """Ask before a deed: nothing for one, a question up to 100, above that the count is to be typed.

    It returns if it may be done. `facts` stand above the question, such as the filter and what is selected. `typed` is
    what has to be typed instead, whatever the count; `alternative` is told where nobody can be asked.
    """
    if yes or (count <= 1 and typed is None):
        return
    sentence = " ".join(filter(None, (verb, f"{count:,}", noun if count == 1 else f"{noun}s", of)))
    if not asking():
        problem = f"nothing was changed: {sentence}? needs an answer, and there is no terminal to ask on"
        raise BartlebyError(problem, hint=alternative or "look first, then say it again with --yes")
    width = max(map(len, facts or {}), default=0)
    for name, fact in (facts or {}).items():
        indented = printable(fact).replace("\n", "\n" + " " * (width + 2))
        click.echo(f"{name:{width}}  {indented}", err=True)
    if typed is not None:
        said = answer(f"{sentence}? Type {typed} to go on: ")
        if said != typed.strip():
            raise BartlebyError(f"nothing was changed: that is not {typed}")
    elif count > _ASKED_UPTO:
        said = answer(f"{sentence}? Type the count to go on: ")
        if re.sub(r"[\s,._']", "", said) != str(count):
            raise BartlebyError(f"nothing was changed: that is not {count:,}")
    elif answer(f"{sentence}? [y/N] ").lower() not in {"y", "yes"}:
        raise BartlebyError("nothing was changed")
