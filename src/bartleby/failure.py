"""The evidence of a failure: what went wrong, where, and which bug it is.

Whatever was raised, this never raises; and it is quick, for in an outage every message fails.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from bartleby.anatomy import before, chain, is_group, leaves, notes_of, text_of, traceback_of, type_name
from bartleby.fingerprint import fingerprint, normalised
from bartleby.frames import Trace, Tracer
from bartleby.redaction import Redactor, joined

_ERROR_LIMIT = 4_000
_TRACEBACK_LIMIT = 20_000
_OUTER_LINKS = 3
_ROOT_LINKS = 4
_MOST_MEMBERS = 5
_BEHIND_A_MEMBER = 3

_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is kept of a failed attempt."""

    error_type: str
    error: str
    traceback: str | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Link:
    """One exception of a chain. `named` says whether it is the declared cause of the one before."""

    name: str
    message: str
    trace: Trace
    named: bool = False
    left_out: int = 0
    members: tuple["_Link", ...] = ()
    more: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


class Recorder:
    """Makes the evidence.

    `redact` adds patterns of secrets; `application` names packages and modules that are the user's own although they
    are installed.
    """

    def __init__(self, redact: Sequence[str | re.Pattern[str]] = (), application: Sequence[str] = ()) -> None:
        self._redactor = Redactor(redact)
        self._tracer = Tracer(self._redactor, application)

    def evidence(self, queue: str, error: BaseException) -> Evidence:
        """Return the evidence of an exception that a handler of this queue raised."""
        try:
            links = self._links(error)
            first = links[0]
            text = first.message if len(links) == 1 and not first.members else _summary(links)
            story = _story(links)
            return Evidence(
                first.name,
                text if len(text) <= _ERROR_LIMIT else _cut(text, _ERROR_LIMIT),
                story if len(story) <= _TRACEBACK_LIMIT else _cut(story, _TRACEBACK_LIMIT),
                _fingerprint(queue, links),
            )
        except BaseException as trouble:  # noqa: BLE001 - a failure must be recorded whatever it is made of
            name = type_name(type(error))
            text = f"<this error cannot be described: {type_name(type(trouble))}>"
            return Evidence(name, text, None, fingerprint(queue, [(name, ())], ()))

    def _links(self, error: BaseException) -> list[_Link]:
        errors = chain(error)
        places = list(range(len(errors)))
        left_out = len(errors) - _OUTER_LINKS - _ROOT_LINKS
        if left_out > 0:
            places = places[:_OUTER_LINKS] + places[-_ROOT_LINKS:]
        links = []
        for count, place in enumerate(places):
            named = place > 0 and before(errors[place - 1])[1]
            links.append(self._link(errors[place], named=named, left_out=left_out if count == _OUTER_LINKS else 0))
        return links

    def _link(self, error: BaseException, *, named: bool, left_out: int = 0) -> _Link:
        text = text_of(error)
        if notes := notes_of(error):
            text = "\n".join([text, *notes])
        members: list[_Link] = []
        more = False
        if is_group(error):
            found = list(islice(leaves(error), _MOST_MEMBERS + 1))
            more = len(found) > _MOST_MEMBERS
            for leaf in found[:_MOST_MEMBERS]:
                behind = chain(leaf, _BEHIND_A_MEMBER)
                members.extend(self._link(each, named=each is not leaf) for each in behind if not is_group(each))
        return _Link(
            type_name(type(error)),
            self._redactor.clean(text, _ERROR_LIMIT),
            self._tracer.trace(traceback_of(error)),
            named,
            max(left_out, 0),
            tuple(members),
            more,
        )


def _summary(links: list[_Link]) -> str:
    lines = []
    for place, link in enumerate(links):
        if link.left_out:
            lines.append(f"… {link.left_out:,} more …")
        relation = "caused by" if link.named else "while handling"
        lines.append(f"{relation} {link.sentence}" if place else link.message)
        lines.extend(f"- {'caused by ' if member.named else ''}{member.sentence}" for member in link.members)
        if link.more:
            lines.append("- …")
    return "\n".join(lines)


def _story(links: list[_Link]) -> str:
    """Return the tracebacks as Python prints them: the root first, the exception that was raised last."""
    if len(links) == 1 and not links[0].members:
        return f"{links[0].trace.text}{links[0].sentence}"
    parts = []
    for link in reversed(links):
        parts.append(f"{link.trace.text}{link.sentence}\n")
        for member in link.members:
            block = f"{'caused by:' if member.named else 'one of its members:'}\n{member.trace.text}{member.sentence}"
            parts.append("  | " + block.replace("\n", "\n  | ") + "\n")
        if link.more:
            parts.append("  | … and more members\n")
        if link.left_out:
            parts.append(f"\n… {link.left_out:,} more exceptions …\n")
        parts.append(_CAUSED if link.named else _DURING)
    return "".join(parts[:-1])


def _fingerprint(queue: str, links: list[_Link]) -> str:
    named = []
    for link in links:
        named.append((link.name, link.trace.path))
        # Which members of a group failed first, and how many, is chance.
        named.extend(sorted({(member.name, member.trace.path) for member in link.members}))
    messages = [normalised(link.message, link.name) for link in (links if len(links) == 1 else (links[0], links[-1]))]
    # An error that is wrapped in its like again and again counts once, however often that was.
    return fingerprint(queue, dict.fromkeys(named), messages)


def _cut(text: str, limit: int) -> str:
    half = limit // 2 - 30
    return joined(text[:half], text[-half:], len(text) - 2 * half)
