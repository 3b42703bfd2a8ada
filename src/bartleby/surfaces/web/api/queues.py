"""/queues and /messages: how each queue does, what steers it, and what is sent."""

from typing import Annotated, Any

from pydantic import AwareDatetime, Field, Tag
from starlette.responses import Response

from bartleby.surfaces import shapes
from bartleby.surfaces.web.api import nouns
from bartleby.surfaces.web.api.answering import LARGEST_ID, MessageId, QueueName, answer, refusals
from bartleby.surfaces.web.api.asking import Asked, Deed, Force, Name, ReasonAsked, new_router, told_by, tree
from bartleby.surfaces.web.api.doing import Writing
from bartleby.surfaces.web.context import AtDesk

router = new_router("queues")

_CENTURY = 100 * 365 * 86400
Policy = Annotated[
    dict[str, Any],
    Field(description="policy keys and their values; see the reference of SQL", examples=[{"max_attempts": 5}]),
]


class Create(Deed):
    """A queue that is to be, or the policy that it is to have."""

    name: Name = Field(examples=["billing"])
    policy: Policy = Field(default_factory=dict)


class Configure(Deed):
    """Policy keys that are to change."""

    policy: Policy


class Pause(Deed):
    """Nothing is to be handed out; with an end, the queue goes on by itself then."""

    until: AwareDatetime | None = Field(None, examples=["2030-01-01T09:00:00+00:00"])


class Message(Asked):
    """A message that is to be sent."""

    payload: Any = Field(description="any JSON value, kept with every digit", examples=[{"id": 42}])
    headers: dict[str, Any] | None = None
    key: Annotated[str, Field(min_length=1, max_length=500)] | None = Field(None, examples=["order-8812"])
    delay: Annotated[float, Field(strict=True, ge=0, le=_CENTURY)] | None = Field(None, description="seconds")
    max_attempts: Annotated[int, Field(strict=True, ge=1, le=32_000)] | None = None
    generation: Annotated[int, Field(strict=True, ge=0, le=LARGEST_ID)] | None = None
    unique_for: Annotated[float, Field(strict=True, gt=0, le=_CENTURY)] | None = Field(
        None, description="seconds in which a second message of this key is not sent"
    )


class Messages(Asked):
    """Many messages; if one of them is bad, none is sent."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]


OneOrMany = Annotated[
    Annotated[Messages, Tag("(many)")] | Annotated[Message, Tag("(one)")],
    told_by("messages", tag="(many)", other="(one)"),
]


@router.get("/queues", response_model=nouns.many(nouns.Queue), responses=refusals(), summary="List queues")
def list_queues(desk: AtDesk) -> Response:
    """Return the queues, how many of their messages are where, and their breakers."""
    return answer(desk.queues.every())


@router.post(
    "/queues", status_code=201, response_model=nouns.Queue, responses=refusals(404, 409), summary="Create a queue"
)
def create_queue(write: Writing, asked: Create) -> Response:
    """Create a queue, or change the policy of the one there is."""
    return write(lambda desk: desk.queues.create(asked.name, asked.policy, reason=asked.reason), 201)


@router.get("/queues/{queue}", response_model=nouns.Queue, responses=refusals(404), summary="Look at a queue")
def get_queue(desk: AtDesk, queue: QueueName) -> Response:
    """Return one queue."""
    return answer(desk.queues.one(queue))


@router.patch("/queues/{queue}", response_model=nouns.Queue, responses=refusals(404, 409), summary="Configure a queue")
def configure_queue(write: Writing, queue: QueueName, asked: Configure) -> Response:
    """Change the policy keys that are given."""
    return write(lambda desk: desk.queues.configure(queue, asked.policy, reason=asked.reason))


@router.delete("/queues/{queue}", status_code=204, responses=refusals(404, 409), summary="Drop a queue")
def drop_queue(write: Writing, queue: QueueName, reason: ReasonAsked, force: Force = False) -> Response:
    """Drop a queue that is empty, or with `force` any."""
    return write(lambda desk: desk.queues.drop(queue, reason=reason, force=force), 204)


@router.post("/queues/{queue}/pause", response_model=nouns.Queue, responses=refusals(404, 409), summary="Pause a queue")
def pause_queue(write: Writing, queue: QueueName, asked: Pause) -> Response:
    """Hand out no messages until then, or until resumed; sending goes on. Pausing again replaces the end."""
    return write.showing(
        lambda desk: desk.queues.pause(queue, reason=asked.reason, until=asked.until),
        lambda desk: desk.queues.one(queue),
    )


@router.post(
    "/queues/{queue}/resume", response_model=nouns.Queue, responses=refusals(404, 409), summary="Resume a queue"
)
def resume_queue(write: Writing, queue: QueueName, asked: Deed) -> Response:
    """Hand out messages again."""
    return write.showing(
        lambda desk: desk.queues.resume(queue, reason=asked.reason), lambda desk: desk.queues.one(queue)
    )


@router.post(
    "/queues/{queue}/open-breaker",
    response_model=nouns.Switched,
    responses=refusals(404, 409),
    summary="Open a breaker",
)
def open_breaker(write: Writing, queue: QueueName, asked: Deed) -> Response:
    """Hand out nothing, not even probes, until somebody closes the breaker."""
    return write(
        lambda desk: {"changed": desk.queues.open_breaker(queue, reason=asked.reason), "queue": desk.queues.one(queue)}
    )


@router.post(
    "/queues/{queue}/close-breaker",
    response_model=nouns.Switched,
    responses=refusals(404, 409),
    summary="Close a breaker",
)
def close_breaker(write: Writing, queue: QueueName, asked: Deed) -> Response:
    """Let a queue go on, whatever the breaker found."""
    return write(
        lambda desk: {"changed": desk.queues.close_breaker(queue, reason=asked.reason), "queue": desk.queues.one(queue)}
    )


@router.post(
    "/queues/{queue}/messages",
    status_code=201,
    response_model=nouns.Sent,
    responses=refusals(404, 413),
    tags=["messages"],
    summary="Send messages",
)
def send_messages(write: Writing, queue: QueueName, _asked: OneOrMany) -> Response:
    """Send one message or many, with every digit of their numbers; the answer has their ids in order."""
    given = tree(write.body)
    messages = [
        {name: each[name] for name in Message.model_fields if name == "payload" or each.get(name) is not None}
        for each in given.get("messages", [given])
    ]
    return write(lambda desk: {"message_ids": desk.queues.send_exactly(queue, messages)}, 201)


@router.get(
    "/messages/{message_id}",
    response_model=nouns.LivingMessage,
    responses=refusals(404),
    tags=["messages"],
    summary="Find a message",
)
def get_message(desk: AtDesk, message_id: MessageId) -> Response:
    """Return a message that is neither done nor dead, and where it is; without its secrets."""
    return answer(desk.letters.message(message_id))


@router.get(
    "/messages/{message_id}/story",
    response_model=nouns.Story,
    responses=refusals(404),
    tags=["messages"],
    summary="Tell the story of a message",
)
def get_story(desk: AtDesk, message_id: MessageId) -> Response:
    """Return where it is, every failed attempt, what was decided, and what people did with it; without secrets."""
    return answer(shapes.story(desk.letters.story(message_id)))
