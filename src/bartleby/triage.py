"""Calls of an operator that are about dead letters: finding them, and what is done to some of them.

A filter is text in the one grammar of every surface: `queue:billing age:>1h type:KeyError payload.customer.id:42`. An
empty one finds all that are dead.
"""

from collections.abc import Sequence
from typing import LiteralString

from bartleby.answers import Row, column, every, first, scalar
from bartleby.calls import Call
from bartleby.evidence import Count, DeadLetter, Deed, Fate, Page
from bartleby.message import MessageId, stated, storable

_LARGEST_PAGE = 10_000

_LETTER: LiteralString = """
select d.message_id, d.queue, d.group_id, d.status, d.status_at, d.reason, d.error_type, d.error, d.traceback,
  d.fingerprint, d.attempts, d.crashes, d.cycle, d.key, d.headers::text, d.payload::text, d.edited::text, d.generation,
  d.worker, d.worker_version, d.created_at, d.first_failed_at, d.dead_at, d.held_at, d.held_by, d.hold_reason,
  d.replay_id, d.replayed_at, d.replayed_by, d.replay_reason, d.resolved_at, d.discarded_by, d.discard_reason,
  d.erased_at, d.failure_history::text"""

_PAGE: LiteralString = """, f.message_id, f.cursor
from bartleby.find_letters(%s, %s::integer, %s, %s) with ordinality as f (message_id, status_at, cursor, place)
left join bartleby.dead_letters d on d.message_id = f.message_id order by f.place"""

_ONE: LiteralString = """
from bartleby.dead_letters d where d.message_id = %s::bigint"""


def dead_letters(
    filter: str = "", *, limit: int = 50, after: str | None = None, sort: str = "newest"
) -> Call[Page[DeadLetter]]:
    """Return a page of the letters that a filter finds; `after` is the `next` of the page before.

    Sorted by when they became what they are (`newest`, `oldest`) or by their ids (`id`, `-id`). Where very many letters
    have to be looked at, a page ends early: it may have few letters, or none, and not be the last.
    """
    # one more tells whether there is more
    asked = limit + 1 if 0 < limit < _LARGEST_PAGE else limit

    def parse(rows: Sequence[Row]) -> Page[DeadLetter]:
        ended_early = bool(rows) and rows[-1][-2] is None
        more = ended_early or len(rows) == asked
        found = rows if ended_early else rows[:limit]
        letters = tuple(DeadLetter(*row[:-2]) for row in found if row[0] is not None)
        return Page(letters, found[-1][-1] if more else None)

    parameters = (storable(filter), asked, stated(after), storable(sort))
    return Call(_LETTER + _PAGE, parameters, parse)


def dead_letter(message_id: int) -> Call[DeadLetter | None]:
    """Return the dead letter of a message, be it dead, replayed, resolved or discarded."""
    return Call(_LETTER + _ONE, (message_id,), first(DeadLetter))


def count_letters(filter: str = "", *, most: int = 10_000) -> Call[Count]:
    """Return how many letters a filter finds; where that has to be counted one by one, up to `most`."""
    text: LiteralString = "select letters, exact from bartleby.count_letters(%s, %s::integer)"
    return Call(text, (storable(filter), most), lambda rows: Count(*rows[0]))


def letter_ids(filter: str, *, most: int) -> Call[list[MessageId]]:
    """Return the ids of the letters that a filter finds, the lowest first, at most so many."""
    text: LiteralString = "select bartleby.letter_ids(%s, %s::integer)"
    return Call(text, (storable(filter), most), column)


def fates(message_ids: Sequence[int]) -> Call[list[Fate]]:
    """Return what letters are now and who made them so; `unknown` is what has no letter."""
    text: LiteralString = "select message_id, status, told from bartleby.fates(%s::bigint[])"
    return Call(text, (list(message_ids),), every(Fate))


def discard(message_ids: Sequence[int], *, actor: str, reason: str, request_id: str | None = None) -> Call[list[Deed]]:
    """Give up on dead letters; they can be restored until their retention is over."""
    parameters = (list(message_ids), *_by(actor, reason), stated(request_id))
    text: LiteralString = "select message_id, outcome, told from bartleby.discard(%s::bigint[], %s, %s, %s)"
    return Call(text, parameters, every(Deed))


def restore(message_ids: Sequence[int], *, actor: str, reason: str, request_id: str | None = None) -> Call[list[Deed]]:
    """Make discarded letters dead again."""
    parameters = (list(message_ids), *_by(actor, reason), stated(request_id))
    text: LiteralString = "select message_id, outcome, told from bartleby.restore(%s::bigint[], %s, %s, %s)"
    return Call(text, parameters, every(Deed))


def hold(
    message_ids: Sequence[int], *, actor: str, reason: str, on: bool = True, request_id: str | None = None
) -> Call[list[Deed]]:
    """Keep letters from retention, discard and replay, or with `on=False` not any more."""
    parameters = (list(message_ids), *_by(actor, reason), on, stated(request_id))
    text: LiteralString = "select message_id, outcome, told from bartleby.hold(%s::bigint[], %s, %s, %s, %s)"
    return Call(text, parameters, every(Deed))


def erase_key(
    key: str, *, actor: str, reason: str, queue: str | None = None, request_id: str | None = None
) -> Call[int]:
    """Erase what the letters of a key say about it, of one queue or of all; return how many letters.

    Payload, headers, key and error texts go; types, fingerprints, counts and times stay.
    """
    parameters = (storable(key), *_by(actor, reason), stated(queue), stated(request_id))
    return Call("select bartleby.erase_key(%s, %s, %s, %s, %s)", parameters, scalar)


def replay(
    message_ids: Sequence[int],
    *,
    actor: str,
    reason: str,
    generation: int | None = None,
    request_id: str | None = None,
) -> Call[list[MessageId]]:
    """Let dead messages live again under their own ids, if wanted in a new generation; return those that were dead."""
    parameters = (list(message_ids), *_by(actor, reason), generation, stated(request_id))
    text: LiteralString = "select bartleby.replay(%s::bigint[], %s, %s, %s::bigint, %s)"
    return Call(text, parameters, column)


def _by(actor: str, reason: str) -> tuple[str, str]:
    return storable(actor), storable(reason)
