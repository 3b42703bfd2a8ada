"""Reading exceptions without trusting them.

A handler may raise anything: classes whose names are properties, texts that raise, causes that go round in circles. So
nothing here asks the exception itself. What C keeps of it is read through the descriptors of `type` and
`BaseException`, which a subclass cannot replace; only its text has to be asked for, and whatever that does is caught.
"""

from collections.abc import Iterator
from types import TracebackType

from bartleby.message import storable

_MODULE = type.__dict__["__module__"].__get__
_QUALNAME = type.__dict__["__qualname__"].__get__
_MRO = type.__dict__["__mro__"].__get__
_CAUSE = BaseException.__dict__["__cause__"].__get__
_CONTEXT = BaseException.__dict__["__context__"].__get__
_SUPPRESS = BaseException.__dict__["__suppress_context__"].__get__
_TRACEBACK = BaseException.__dict__["__traceback__"].__get__
_OWN_DICT = BaseException.__dict__["__dict__"].__get__
_MEMBERS = BaseExceptionGroup.__dict__["exceptions"].__get__

_LONGEST_NAME = 149  # of a module and of a class: the database keeps 300 of both
_LONGEST_WALK = 20_000
_MOST_NOTES = 20
_MOST_KINDS = 2000

# By identity: a metaclass may have a __hash__ or an __eq__ of its own. The class is kept, so that its id stays its own.
_kinds: dict[int, tuple[type, str, frozenset[str]]] = {}


def type_name(kind: type) -> str:
    """Return the name of a class as a reader knows it: `KeyError`, `psycopg.errors.UniqueViolation`."""
    return _kind(kind)[1]


def ancestry(kind: type) -> frozenset[str]:
    """Return the names of a class and of all its bases."""
    return _kind(kind)[2]


def bases(kind: type) -> tuple[type, ...]:
    """Return the classes whose instances `except` would catch an instance of this class as."""
    found: tuple[type, ...] = _MRO(kind)
    return found


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or a word about why it has none."""
    try:
        # A subclass of str may behave as it likes; from here on it is a plain one.
        return str.__str__(str(error))
    except BaseException as trouble:  # noqa: BLE001 - __str__ is foreign code and may raise SystemExit too
        return f"<this error has no text: its __str__ raised {type_name(type(trouble))}>"


def notes_of(error: BaseException) -> list[str]:
    """Return what add_note() added, as far as it is text."""
    notes = _OWN_DICT(error).get("__notes__")
    if type(notes) is not list:
        return []
    return [str.__str__(note) for note in notes[:_MOST_NOTES] if isinstance(note, str)]


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception."""
    found: TracebackType | None = _TRACEBACK(error)
    return found


def before(error: BaseException) -> tuple[BaseException | None, bool]:
    """Return the exception behind this one, and whether it was named as its cause (`raise … from …`)."""
    cause: BaseException | None = _CAUSE(error)
    if cause is not None:
        return cause, True
    context: BaseException | None = None if _SUPPRESS(error) else _CONTEXT(error)
    return context, False


def chain(error: BaseException, most: int = _LONGEST_WALK) -> list[BaseException]:
    """Return an exception and those behind it, the root last; a circle ends where it would begin again."""
    found = [error]
    following, _ = before(error)
    if following is None:
        return found
    seen = {id(error)}
    while following is not None and id(following) not in seen and len(found) < most:
        found.append(following)
        seen.add(id(following))
        following, _ = before(following)
    return found


def is_group(error: BaseException) -> bool:
    """Say whether an exception is an exception group."""
    return issubclass(type(error), BaseExceptionGroup)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the members of a group that are no groups themselves, from first to last, as far as a walk goes."""
    waiting = [error]
    visited = 0
    while waiting and visited < _LONGEST_WALK:
        visited += 1
        current = waiting.pop()
        if is_group(current):
            waiting.extend(reversed(_MEMBERS(current)[:_LONGEST_WALK]))
        else:
            yield current


def _kind(kind: type) -> tuple[type, str, frozenset[str]]:
    known = _kinds.get(id(kind))
    if known is None or known[0] is not kind:
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        known = _kinds[id(kind)] = (kind, _full_name(kind), frozenset(map(_full_name, bases(kind))))
    return known


def _full_name(kind: type) -> str:
    module, name = _MODULE(kind), _one_line(_QUALNAME(kind))
    home = _one_line(module) if isinstance(module, str) else ""
    return name if home in {"", "builtins", "__main__"} else f"{home}.{name}"


def _one_line(name: str) -> str:
    return " ".join(storable(str.__str__(name)[:_LONGEST_NAME]).split())
