"""Groups at the desk: of how many bugs the letters died, and what is said of each bug."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from bartleby.client import Runner
from bartleby.errors import UnknownGroup
from bartleby.evidence import Group, GroupId, GroupRule, Page, SharedValue, term
from bartleby.grouping import split_group
from bartleby.inspection import GroupReplay, GroupVersion
from bartleby.measures import latest_groups
from bartleby.message import encode
from bartleby.principal import Permission
from bartleby.surfaces.desk import hiding
from bartleby.surfaces.desk.exact import MARK, Exact, exactly
from bartleby.surfaces.desk.seat import Seat


@dataclass(frozen=True, slots=True)
class Portrait:
    """A group, with what its letters share, which versions of workers they came from, and what was tried."""

    group: Group
    shared: Sequence[SharedValue]
    versions: Sequence[GroupVersion]
    replays: Sequence[GroupReplay]


class Groups:
    """Groups, as one principal finds them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def every(
        self,
        queue: str | None = None,
        *,
        states: Sequence[str] | None = None,
        everything: bool = False,
        limit: int = 100,
    ) -> list[Group]:
        """Return the groups with most dead letters first."""
        return list(self.page(queue, states=states, everything=everything, limit=limit))

    def lively(self, queue: str | None = None, *, limit: int) -> list[Group]:
        """Return the groups with most dead letters; where those are not all, also the newest and what dies just now."""
        found, seat = self.every(queue, limit=limit), self._seat
        if len(found) < limit:
            return found
        with seat.narrowed(term("queue", queue) if queue else "") as narrow:
            latest = seat.looking().run(latest_groups(narrow))
        known = {each.id for each in found}
        theirs = [each for each in latest if each.id not in known and seat.principal.sees(each.queue)]
        return found + [self._cleaned(each) for each in theirs if queue in {None, each.queue}]

    def page(
        self,
        queue: str | None = None,
        *,
        states: Sequence[str] | None = None,
        everything: bool = False,
        limit: int = 100,
        after: tuple[int, int] | None = None,
    ) -> Page[Group]:
        """Return a page of the groups with most dead letters first, after one with so many letters and this id."""
        reader, principal = self._seat.looking(), self._seat.principal
        wanted: list[str | None] = [queue]
        if queue is None and principal.queues is not None:
            wanted = [*sorted(principal.queues)]
        found = [
            group
            for name in wanted
            if name is None or principal.sees(name)
            for group in reader.groups(name, limit=limit, states=states, everything=everything, after=after)
        ]
        found = sorted(found, key=lambda each: (-each.dead, -each.id))[:limit]
        more = f"{found[-1].dead}/{found[-1].id}" if len(found) == limit else None
        return Page(tuple(map(self._cleaned, found)), more)

    def one(self, group_id: int) -> Group:
        """Return one group."""
        group = self._seat.looking().group(group_id)
        if group is None or not self._seat.principal.sees(group.queue):
            raise UnknownGroup(f"there is no group {group_id}", hint="it may have become part of another group")
        return self._cleaned(group)

    def portrait(self, group_id: int) -> Portrait:
        """Return a group and all that helps to find its cause."""
        group, reader = self.one(group_id), self._seat.looking()
        return Portrait(group, self.shared(group_id), reader.group_versions(group_id), self.replays(group_id))

    def versions(self, group_id: int) -> list[GroupVersion]:
        """Return from which versions of workers a group came last."""
        self.one(group_id)
        return self._seat.looking().group_versions(group_id)

    def replays(self, group_id: int) -> list[GroupReplay]:
        """Return what was tried with a group, the newest first, but for plans that are about other queues, too."""
        self.one(group_id)
        hide = self._seat.redaction
        found = filter(self._seen, self._seat.looking().group_replays(group_id))
        return [replace(each, reason=hide.words(each.reason), cause=hiding.words(hide, each.cause)) for each in found]

    def _seen(self, tried: GroupReplay) -> bool:
        seat = self._seat
        if seat.principal.queues is None or tried.replay_id is None:
            return True
        plan = seat.looking().find_replay(tried.replay_id)
        return plan is not None and seat.sees_plan(plan)

    def shared(self, group_id: int) -> list[SharedValue]:
        """Return which values the newest letters of a group have in common, without secrets."""
        self.one(group_id)
        return [hiding.shared(self._seat.redaction, each) for each in self._seat.looking().shared_values(group_id)]

    def acknowledge(self, group_id: int, *, reason: str, owner: str | None = None, link: str | None = None) -> None:
        """Say that somebody is at it."""
        operator = self._theirs(group_id)
        operator.acknowledge_group(group_id, owner=owner, link=link, **self._seat.signed(reason))

    def mute(self, group_id: int, until: datetime, *, reason: str) -> None:
        """Do not be told of a group until then."""
        self._theirs(group_id).mute_group(group_id, until, **self._seat.signed(reason))

    def resolve(self, group_id: int, *, reason: str, version: str | None = None) -> None:
        """Say that the bug is fixed."""
        self._theirs(group_id).resolve_group(group_id, version=version, **self._seat.signed(reason))

    def reopen(self, group_id: int, *, reason: str) -> None:
        """Make a group open again."""
        self._theirs(group_id).reopen_group(group_id, **self._seat.signed(reason))

    def merge(self, group_ids: Sequence[int], *, into: int, reason: str) -> int:
        """Make several groups one; return how many letters moved."""
        for each in (*group_ids, into):
            self.one(each)
        operator = self._seat.doing(Permission.TRIAGE)
        return operator.merge_groups(group_ids, into=into, **self._seat.signed(reason))

    def split(self, group_id: int, path: str, value: object, *, reason: str, title: str | None = None) -> GroupId:
        """Give letters with this value at this path a group of their own; return its id."""
        call = split_group(group_id, path, MARK, title=title, **self._seat.signed(reason))
        return self._theirs(group_id).run(exactly(call, value if isinstance(value, Exact) else encode(value)))

    def rules(self, queue: str | None = None) -> list[GroupRule]:
        """Return the rules that merges and splits have made."""
        found = self._seat.looking().group_rules(queue)
        return [hiding.rule(self._seat.redaction, each) for each in found if self._seat.principal.sees(each.queue)]

    def remove_rule(self, rule_id: int, *, reason: str) -> None:
        """Take back a merge or a split."""
        operator = self._seat.doing(Permission.TRIAGE)
        if rule_id not in {each.id for each in self.rules()}:
            raise UnknownGroup(f"there is no rule {rule_id}")
        operator.remove_rule(rule_id, **self._seat.signed(reason))

    def _theirs(self, group_id: int) -> Runner:
        operator = self._seat.doing(Permission.TRIAGE)
        self.one(group_id)
        return operator

    def _cleaned(self, group: Group) -> Group:
        hide = self._seat.redaction
        return replace(
            group,
            fingerprint=hiding.words(hide, group.fingerprint),
            title=hiding.words(hide, group.title),
            error=hiding.words(hide, group.error),
            note=hiding.words(hide, group.note),
        )
