"""What a filter can say, for whoever types one: fields, their choices, queues, and paths that letters really have."""

from collections.abc import Iterable, Iterator

from fastapi.responses import JSONResponse

from bartleby.documents import parsed
from bartleby.errors import Forbidden, InvalidFilter
from bartleby.evidence import term
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.rendering import router

_SAMPLE = 20
_MOST_PATHS = 100
_DEEPEST = 6
_LONGEST = 120

FIELDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "queue": ("a queue", ()),
    "status": ("dead, unless it says otherwise", ("dead", "replayed", "resolved", "discarded", "any")),
    "group": ("the number of a group", ()),
    "type": ("type of the error; * at the end", ()),
    "error": ("words of the error", ()),
    "key": ("key of the message; * at the end", ()),
    "id": ("number of the letter", ()),
    "reason": ("why it died", ("exhausted", "terminal", "unacceptable", "crashed", "expired")),
    "age": ("how long it is dead", ("<1h", "<24h", ">7d")),
    "dead": ("when it died, UTC", ()),
    "attempts": ("how often it was tried", (">=5", "1")),
    "cycle": ("which life it is", (">1",)),
    "worker": ("the worker that had it", ()),
    "version": ("version of that worker", ()),
    "generation": ("generation of its code", ()),
    "held": ("on hold", ("yes", "no")),
    "edited": ("edited for a replay", ("yes", "no")),
    "erased": ("its payload was erased", ("yes", "no")),
    "replay": ("the number of a replay", ()),
    "fingerprint": ("what it was grouped by", ()),
    "payload": ("a value: payload.customer.id:42", ()),
    "headers": ("a value: headers.tenant:acme", ()),
}

filter_words = router()


@filter_words.get("/letters/words")
def words(desk: AtDesk, filter: str = "") -> JSONResponse:
    """Return what a filter can say; paths are those of the letters that the page shows."""
    try:
        letters = list(desk.letters.page(filter, limit=_SAMPLE, longest=0))
    except (InvalidFilter, Forbidden):
        letters = list(desk.letters.page(limit=_SAMPLE))
    payloads, headers = [each.raw for each in letters], [each.raw_headers for each in letters]
    said = {
        "fields": [{"name": name, "means": means, "choices": some} for name, (means, some) in FIELDS.items()],
        "queues": [each.name for each in desk.queues.every()],
        "types": _values("type", (each.error_type for each in letters)),
        "versions": _values("version", (each.worker_version for each in letters)),
        "paths": paths_in(payloads) + paths_in(headers, "headers"),
    }
    return JSONResponse(said, headers={"Cache-Control": "no-store"})


def _values(field: str, found: Iterable[str | None]) -> list[str]:
    # as a filter has them: in quotes where that is needed
    return sorted({term(field, each).partition(":")[2] for each in found if each})


def paths_in(documents: Iterable[str | None], root: str = "payload") -> list[str]:
    """Return which places documents have that a filter can name, the first seen first."""
    found: dict[str, None] = {}
    for raw in documents:
        for path in _paths(raw, root):
            found.setdefault(path)
            if len(found) >= _MOST_PATHS:
                return list(found)
    return list(found)


def _paths(raw: str | None, root: str) -> Iterator[str]:
    try:
        yield from _below(parsed(raw or "null"), root, 0)
    except (ValueError, RecursionError):
        return


def _below(node: object, path: str, depth: int) -> Iterator[str]:
    if isinstance(node, dict) and depth < _DEEPEST:
        for name, value in node.items():
            if _can_be_named(name) and len(path) + len(name) < _LONGEST:
                yield from _below(value, f"{path}.{name}", depth + 1)
    elif depth and not isinstance(node, dict | list):
        yield path


def _can_be_named(name: str) -> bool:
    return name != "" and name.isascii() and all(each.isalnum() or each in "_-" for each in name)
