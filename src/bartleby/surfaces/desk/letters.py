"""Dead letters at the desk: find them, look at one, and what can be done to some."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bartleby.errors import BartlebyError, InvalidArgument, PlanDrifted, UnknownMessage, UnknownQueue
from bartleby.evidence import Attempt, AuditLine, Count, DeadLetter, Page
from bartleby.message import LivingMessage, MessageId
from bartleby.operations import Bulk, require_meant
from bartleby.principal import Permission
from bartleby.surfaces.cycles import Story, gather
from bartleby.surfaces.desk import hiding
from bartleby.surfaces.desk.naming import says_status
from bartleby.surfaces.desk.seat import Seat

LARGEST_PAGE = 500
_LONGEST_SEARCH = 2.0
_MOST_AT_ONCE = 100_000
_MOST_REPLAYED = 100
_MOST_LINES = 1000
_RANGE = re.compile(r"\[(\d{1,18}),(\d{1,18})\)")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters a deed is for: these ids, or what a filter finds, as many as somebody has looked at."""

    ids: Sequence[int] | None = None
    filter: str | None = None
    everything: bool = False
    expected: int | None = None

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.filter is None):
            raise InvalidArgument("either ids or a filter says which letters are meant", hint="give one of them")


class Letters:
    """Dead letters, as one principal finds them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def page(
        self,
        filter: str = "",
        *,
        limit: int = 50,
        after: str | None = None,
        sort: str = "newest",
        longest: float = _LONGEST_SEARCH,
    ) -> Page[DeadLetter]:
        """Return a page. A search that looks in vain for so many seconds ends early, and can be gone on with."""
        reader, seat = self._seat.looking(), self._seat
        found: list[DeadLetter] = []
        until = time.monotonic() + longest
        with seat.narrowed(filter) as narrow:
            while True:
                page = reader.dead_letters(narrow, limit=limit - len(found), after=after, sort=sort)
                found += page
                after = page.next
                if page.complete or len(found) >= limit or time.monotonic() >= until:
                    return Page(tuple(map(seat.letter, found)), after)

    def count(self, filter: str = "", *, most: int = 10_000) -> Count:
        """Return how many there are, counted one by one up to `most`."""
        with self._seat.narrowed(filter) as narrow:
            return self._seat.looking().count_letters(narrow, most=most)

    def every(self, filter: str = "", *, sort: str = "newest") -> Iterator[DeadLetter]:
        """Yield every letter that a filter finds, page by page."""
        after = None
        while True:
            page = self.page(filter, limit=LARGEST_PAGE, after=after, sort=sort)
            yield from page
            if page.complete:
                return
            after = page.next

    def one(self, message_id: int) -> DeadLetter:
        """Return one letter without its secrets."""
        return self._seat.letter(self._whole(message_id))

    def reveal(self, message_id: int, *, reason: str) -> DeadLetter:
        """Return one letter as it is; the audit knows who looked, and why."""
        operator = self._seat.doing(Permission.REVEAL)
        letter = self._whole(message_id)
        operator.note("payload.reveal", {"message_id": message_id, "queue": letter.queue}, **self._seat.signed(reason))
        return self._seat.own(letter)

    def attempts(self, message_id: int) -> list[Attempt]:
        """Return what the ledger says about the attempts at a letter, without secrets, the oldest first."""
        self._whole(message_id)
        return self._attempts(self._seat.looking().attempts(message_id))

    def message(self, message_id: int) -> LivingMessage:
        """Return a message that is neither done nor dead, without its secrets."""
        message = self._seat.looking().find_message(message_id)
        if message is None or not self._seat.principal.sees(message.queue):
            raise UnknownMessage(f"no message {message_id} is alive", hint="it may be done, or a dead letter")
        return self._seat.message(message)

    def story(self, message_id: int) -> Story:
        """Return everything that is known of a message, without secrets."""
        seat = self._seat
        try:
            story = gather(seat.looking(), message_id)
        except BartlebyError as error:
            if type(error) is not BartlebyError:
                raise
            raise _unknown(message_id) from None
        known = story.letter or story.message or next(iter(story.attempts), None)
        if not seat.principal.sees(None if known is None else known.queue):
            raise _unknown(message_id)
        hide, alive, queue = seat.redaction, story.message, story.queue
        if alive is not None and not seat.principal.sees(alive.queue):  # replayed into a queue of others
            alive = None
        plans = {each: hiding.plan(hide, plan) for each, plan in story.plans.items() if seat.sees_plan(plan)}
        return replace(
            story,
            letter=None if story.letter is None else seat.letter(story.letter),
            message=None if alive is None else seat.message(alive),
            elsewhere=alive is not story.message,
            queue=queue if queue is not None and seat.principal.sees(queue.name) else None,
            attempts=self._attempts(story.attempts),
            items=[hiding.item(hide, each) for each in story.items if each.replay_id in plans],
            plans=plans,
            deeds=[self._deed(message_id, each) for each in story.deeds],
        )

    def _deed(self, message_id: int, line: AuditLine) -> AuditLine:
        cleaned = hiding.audit(self._seat.redaction, line)
        if self._seat.principal.queues is None:
            return cleaned
        # it may have been done to letters of other queues, too
        return replace(cleaned, subject={"message_ids": str(message_id)}, before=None, after=None)

    def _attempts(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        return [self._seat.attempt(each) for each in attempts if self._seat.principal.sees(each.queue)]

    def discard(self, selection: Selection, *, reason: str) -> Bulk:
        """Give up on letters; they can be restored until their retention is over."""
        operator = self._seat.acting(Permission.DISCARD)
        return operator.discard(self.chosen(selection), reason=reason)

    def restore(self, selection: Selection, *, reason: str) -> Bulk:
        """Make discarded letters dead again."""
        operator = self._seat.acting(Permission.DISCARD)
        return operator.restore(self.chosen(selection, "status:discarded"), reason=reason)

    def undo(self, request_id: str, *, reason: str) -> Bulk:
        """Restore what one request of theirs has discarded: the audit knows which letters those were."""
        operator, name = self._seat.acting(Permission.DISCARD), self._seat.principal.name
        lines = operator.client.audit_log(limit=_MOST_LINES, actor=name, action="letter.discard", request_id=request_id)
        ranges = [each for line in lines for each in _RANGE.findall(str(line.subject.get("message_ids")))]
        if sum(int(end) - int(begin) for begin, end in ranges) > _MOST_AT_ONCE:
            raise InvalidArgument(f"more than {_MOST_AT_ONCE:,} letters are not undone at once", hint="restore them")
        ids = [each for begin, end in ranges for each in range(int(begin), int(end))]
        return operator.restore(self._seat.visible(ids), reason=reason)

    def hold(self, selection: Selection, *, reason: str, on: bool = True) -> Bulk:
        """Keep letters from retention, discard and replay, or with `on=False` not any more."""
        operator = self._seat.acting(Permission.DISCARD)
        return operator.hold(self.chosen(selection), reason=reason, on=on)

    def replay(self, ids: Sequence[int], *, reason: str) -> list[MessageId]:
        """Let a few letters live again at once; return those that were dead. More than a few are a plan."""
        operator = self._seat.doing(Permission.REPLAY)
        if len(ids) > _MOST_REPLAYED:
            raise InvalidArgument(f"at most {_MOST_REPLAYED} letters are replayed at once", hint="make a plan of them")
        return operator.replay(self._seat.visible(ids), **self._seat.signed(reason))

    def erase(self, key: str, *, reason: str, queue: str | None = None) -> int:
        """Erase what the letters of a key say about it; return how many letters there were."""
        if queue is None:
            operator = self._seat.doing_everywhere(Permission.ERASE)
        else:
            operator = self._seat.doing(Permission.ERASE)
            if not self._seat.principal.sees(queue):
                raise UnknownQueue(f"there is no queue {queue!r}")
        return operator.erase_key(key, queue=queue, **self._seat.signed(reason))

    def chosen(self, selection: Selection, usually: str = "") -> list[MessageId]:
        """Return the ids that are meant; a filter finds as many as were expected, or nothing is done."""
        if selection.ids is not None:
            return self._seat.visible(selection.ids)
        filter = selection.filter or ""
        require_meant(filter, everything=selection.everything)
        if usually and not says_status(filter):
            filter = f"{filter} {usually}".strip()
        operator = self._seat.acting(Permission.DISCARD)
        with self._seat.narrowed(filter) as narrow:
            ids = operator.choose(narrow, everything=selection.everything, most=_MOST_AT_ONCE)
        if selection.expected is not None and len(ids) != selection.expected:
            raise PlanDrifted(
                f"{selection.expected:,} letters were looked at, and now the filter finds {len(ids):,}",
                hint="nothing was done: look again, then say it again",
            )
        return ids

    def _whole(self, message_id: int) -> DeadLetter:
        letter = self._seat.looking().dead_letter(message_id)
        if letter is None or not self._seat.principal.sees(letter.queue):
            raise _unknown(message_id)
        return letter


def _unknown(message_id: int) -> UnknownMessage:
    return UnknownMessage(f"there is no dead letter {message_id}", hint="it may be done, or its retention is over")
