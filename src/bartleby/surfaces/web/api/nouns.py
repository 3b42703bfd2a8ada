"""What the API documents of its nouns: each model is made of the class that is sent, so that they cannot differ."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, create_model

from bartleby import evidence, inspection, message, operations, replays
from bartleby.attendance import WorkerReport
from bartleby.credentials import Token as TokenNoun
from bartleby.events import Sink as SinkNoun
from bartleby.surfaces import desk
from bartleby.surfaces.checkup import Finding as FindingNoun
from bartleby.surfaces.desk.groups import Portrait as PortraitNoun
from bartleby.surfaces.desk.office import NewToken as NewTokenNoun
from bartleby.surfaces.desk.replays import Preview as PreviewNoun
from bartleby.surfaces.shapes import shown


def model(noun: type, name: str | None = None, **more: Any) -> Any:  # noqa: ANN401 - a type, and fields of pydantic
    """Return the model of a noun as `shapes.text` writes it, with more fields or others."""
    hints, names = get_type_hints(noun), [each.name for each in fields(noun)]
    made: dict[str, Any] = {}
    for each in names:
        if each.startswith("raw"):
            made[shown(each, names)] = (Any, Field(description="a JSON document, with every digit of its numbers"))
        else:
            made[each] = (_type(hints[each]), ...)
    return create_model(name or noun.__name__, __doc__=noun.__doc__, **{**made, **more})


def many(item: Any) -> Any:  # noqa: ANN401 - a type
    """Return the type of a list of these."""
    return list[item]


def maybe(item: Any) -> Any:  # noqa: ANN401 - a type
    """Return the type of this, or null."""
    return item | None


def paged(item: Any, name: str) -> Any:  # noqa: ANN401 - a type
    """Return the model of a page of these."""
    following = Field(description="where the following page begins (`after`); null if this was the last")
    said = "A part of a list; it may be short without being the last."
    return create_model(name, __doc__=said, items=(many(item), ...), next=(str | None, following))


@cache
def _known(noun: type) -> Any:  # noqa: ANN401 - a type
    return model(noun)


def _type(hint: Any) -> Any:  # noqa: ANN401 - a type
    origin, inner = get_origin(hint), get_args(hint)
    if hint is timedelta:
        return float
    if isinstance(hint, type) and is_dataclass(hint):
        return _known(hint)
    if origin is Mapping:
        return dict[str, Any]
    if origin in {Sequence, list, tuple}:
        return many(_type(inner[0]))
    if type(None) in inner:
        return maybe(_type(next(each for each in inner if each is not type(None))))
    return hint


Letter = _known(evidence.DeadLetter)
Letters = paged(Letter, "DeadLetters")
Count = _known(evidence.Count)
Attempt = _known(evidence.Attempt)
Bulk = _known(operations.Bulk)
Group = _known(evidence.Group)
Groups = paged(Group, "Groups")
SharedValue = _known(evidence.SharedValue)
GroupVersion = _known(inspection.GroupVersion)
GroupReplay = _known(inspection.GroupReplay)
Portrait = _known(PortraitNoun)
Rule = _known(evidence.GroupRule)
AuditLine = _known(evidence.AuditLine)
AuditLines = paged(AuditLine, "AuditLines")
AuditProblem = _known(evidence.AuditProblem)
Queue = _known(message.Queue)
LivingMessage = _known(message.LivingMessage)
Sink = _known(SinkNoun)
Token = _known(TokenNoun)
NewToken = _known(NewTokenNoun)
Worker = model(WorkerReport, "Worker")
Finding = _known(FindingNoun)
BarePlan = model(replays.Replay, "BareReplay")
Plan = model(
    replays.Replay,
    will_run=(int, Field(description="items that are predicted to run")),
    settled=(int, Field(description="items that have their outcome")),
)
Plans = paged(Plan, "Replays")
Item = _known(replays.ReplayItem)
Items = paged(Item, "ReplayItems")
Change = _known(replays.Change)
Preview = model(PreviewNoun, plan=(Plan, ...))
Overview = model(desk.Overview, replays=(many(Plan), ...))
Story = create_model(
    "Story",
    __doc__="Everything that is known of a message.",
    message_id=(int, ...),
    state=(str, Field(description="ready, leased, deferred, dead, discarded, done, elsewhere, or untraced")),
    message=(maybe(LivingMessage), ...),
    dead_letter=(maybe(Letter), ...),
    attempts=(many(Attempt), ...),
    queue=(maybe(Queue), ...),
    replay_items=(many(Item), ...),
    replays=(many(BarePlan), ...),
    deeds=(many(AuditLine), ...),
    next=(str, Field(description="what can be done now")),
)
Switched = create_model(
    "Switched", __doc__="A queue, and whether something was changed.", changed=(bool, ...), queue=(Queue, ...)
)
Verified = create_model(
    "Verified",
    __doc__="What a check of the whole audit has found.",
    intact=(bool, ...),
    problems=(many(AuditProblem), ...),
)


class Drained(BaseModel):
    """A worker that is to stop."""

    changed: bool = Field(description="false if it was told before")


class Sent(BaseModel):
    """Messages that were sent."""

    message_ids: list[int]


class Replayed(BaseModel):
    """Letters that live again."""

    message_ids: list[int] = Field(description="those that were dead; the others are left as they were")


class Moved(BaseModel):
    """Letters that have another group now."""

    letters: int


class Erased(BaseModel):
    """Letters of which nothing is left that could tell of somebody."""

    letters: int


class Anchor(BaseModel):
    """The end of the audit, to be kept outside of the database."""

    anchor: str
