"""A group as a text in Markdown, for a ticket or a chat: what dies, since when, what it shares, and what was tried."""

import re
from collections.abc import Iterator

from bartleby.documents import HIDDEN
from bartleby.surfaces.desk.groups import Portrait
from bartleby.surfaces.web.pages.showing import culprit, short, utc, visible, without

_MOST_SHARED = 5
_MOST_TRIED = 10
_TICKS = re.compile("`+")


def summary(portrait: Portrait, address: str, traceback: str | None = None) -> str:
    """Return the incident in Markdown; `address` is where its page is."""
    return "\n".join(_lines(portrait, address, traceback))


def _lines(portrait: Portrait, address: str, traceback: str | None) -> Iterator[str]:
    group = portrait.group
    kind = group.error_type or "Error"
    yield f"## {_code(kind)}: {_code(short(without(group.error or group.title or 'no error was given', kind), 200))}"
    yield ""
    yield f"- queue {_code(group.queue)}, [group {group.id}]({address}), {group.state}"
    yield f"- {group.dead:,} dead, {group.replayed:,} alive, {group.resolved:,} done, {group.discarded:,} discarded"
    yield f"- first {utc(group.first_dead_at)}, last {utc(group.last_dead_at)}, {group.deaths_last_hour:,} last hour"
    place = culprit(traceback)
    if place:
        yield f"- dies at {_code(short(place, 200))}"
    if group.versions:
        yield f"- newest version of workers: {_code(short(group.versions[-1], 60))}"
    common = [each for each in portrait.shared if each.letters == each.of and HIDDEN not in each.raw]
    if common:
        values = (f"{_code(each.path)} = {_code(short(each.raw, 60))}" for each in common[:_MOST_SHARED])
        yield f"- all its letters have {', '.join(values)}"
    if group.owner or group.note:
        yield f"- {_code(short(group.owner or group.state_by, 60))} says: {_code(short(group.note or 'is at it', 200))}"
    for each in portrait.replays[:_MOST_TRIED]:
        came = f"{each.done:,} done, {each.died_again:,} died again"
        yield f"- {utc(each.at)}: {_code(short(each.actor, 60))} replayed {each.items:,}: {came}"


def _code(text: str) -> str:
    """Return a text of a stranger as code: nothing in it is a link, a mention or a picture."""
    shown = str(visible(short(text, 200)))  # in one line: a blank one would end the code
    longest = max((len(each) for each in _TICKS.findall(shown)), default=0)
    fence = "`" * (longest + 1)
    blank = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{blank}{shown}{blank}{fence}"
