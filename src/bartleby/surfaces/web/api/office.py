"""What is about the whole installation: overview, sinks, audit, check-up, tokens, erasures."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request
from pydantic import AwareDatetime, Field
from starlette.responses import Response

from bartleby.evidence import Page
from bartleby.principal import Role
from bartleby.surfaces import shapes
from bartleby.surfaces.web.api import nouns
from bartleby.surfaces.web.api.answering import LARGEST_ID, Limit, Number, SinkName, answer, page, refusals
from bartleby.surfaces.web.api.asking import Deed, Force, Name, ReasonAsked, new_router
from bartleby.surfaces.web.api.doing import Writing
from bartleby.surfaces.web.context import AtDesk

router = new_router()

_TOKENS_LAST = timedelta(days=90)

Words = Annotated[str | None, Query(max_length=200)]


class PutSink(Deed):
    """A sink that is to be, or what is to change of one."""

    kind: Name = Field(examples=["webhook"])
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="options, types, queues, attempts, delay, timeout, include_payload, link; what is not named stays",
        examples=[{"options": {"url": "https://hooks.example/bartleby"}, "attempts": 5}],
    )


class AddToken(Deed):
    """Somebody, or a program, that is to come in."""

    name: Name = Field(description="what the audit calls them", examples=["deploy"])
    role: Role = Field(examples=["reader"])
    queues: Annotated[list[Name], Field(min_length=1, max_length=1000)] | None = Field(
        None, description="held to these; null: all"
    )
    expires: AwareDatetime | Literal["never"] | None = Field(
        None, description="without it, 90 days from now", examples=["2030-01-01T00:00:00+00:00"]
    )

    def until(self) -> datetime | None:
        """Return when it ends; None for never."""
        if self.expires is None:
            return datetime.now(UTC) + _TOKENS_LAST
        return self.expires if isinstance(self.expires, datetime) else None


class Erase(Deed):
    """Whose letters are to say nothing any more."""

    key: Annotated[str, Field(min_length=1, max_length=500)] = Field(examples=["customer-17"])
    queue: Name | None = Field(None, description="of one queue; null: of all")


@router.get("/overview", response_model=nouns.Overview, responses=refusals(), tags=["overview"], summary="What is now")
def get_overview(desk: AtDesk) -> Response:
    """Return how the queues do, the largest bugs that are open, plans that are not over, and sinks."""
    found = desk.overview()
    return answer({**shapes.members(found), "replays": [shapes.plan(each) for each in found.replays]})


@router.get(
    "/doctor", response_model=nouns.many(nouns.Finding), responses=refusals(), tags=["doctor"], summary="Check up"
)
def get_doctor(desk: AtDesk) -> Response:
    """Return what `bartleby doctor` finds, with remedies."""
    return answer(desk.office.doctor())


@router.get(
    "/workers", response_model=nouns.many(nouns.Worker), responses=refusals(), tags=["workers"], summary="List workers"
)
def list_workers(desk: AtDesk) -> Response:
    """Return who works, and what each holds."""
    return answer(desk.office.workers())


@router.post(
    "/workers/{worker}/drain",
    response_model=nouns.Drained,
    responses=refusals(404),
    tags=["workers"],
    summary="Drain a worker",
)
def drain_worker(
    write: Writing,
    worker: Annotated[str, Path(min_length=1, max_length=200, description="the name of a worker")],
    asked: Deed,
) -> Response:
    """Have a worker stop when what it runs is finished; it hears of it within 10 s."""
    return write(lambda desk: {"changed": desk.office.drain_worker(worker, reason=asked.reason)})


@router.get("/sinks", response_model=nouns.many(nouns.Sink), responses=refusals(), tags=["sinks"], summary="List sinks")
def list_sinks(desk: AtDesk) -> Response:
    """Return all sinks and how each does, without secrets."""
    return answer(desk.office.sinks())


@router.get(
    "/sinks/{sink}", response_model=nouns.Sink, responses=refusals(404), tags=["sinks"], summary="Look at a sink"
)
def get_sink(desk: AtDesk, sink: SinkName) -> Response:
    """Return one sink and how it does, without secrets."""
    return answer(desk.office.sink(sink))


@router.put(
    "/sinks/{sink}", response_model=nouns.Sink, responses=refusals(404, 409), tags=["sinks"], summary="Set up a sink"
)
def put_sink(write: Writing, sink: SinkName, asked: PutSink) -> Response:
    """Add a sink, or change what is named of one."""
    return write.showing(
        lambda desk: desk.office.put_sink(sink, asked.kind, asked.settings, reason=asked.reason),
        lambda desk: desk.office.sink(sink),
    )


@router.delete("/sinks/{sink}", status_code=204, responses=refusals(404, 409), tags=["sinks"], summary="Remove a sink")
def remove_sink(write: Writing, sink: SinkName, reason: ReasonAsked, force: Force = False) -> Response:
    """Forget a sink for which nothing waits, or with `force` any."""
    return write(lambda desk: desk.office.remove_sink(sink, reason=reason, force=force), 204)


@router.post(
    "/sinks/{sink}/pause",
    response_model=nouns.Sink,
    responses=refusals(404, 409),
    tags=["sinks"],
    summary="Pause a sink",
)
def pause_sink(write: Writing, sink: SinkName, asked: Deed) -> Response:
    """Send nothing to a sink for now; events wait for it."""
    return write.showing(
        lambda desk: desk.office.pause_sink(sink, reason=asked.reason), lambda desk: desk.office.sink(sink)
    )


@router.post(
    "/sinks/{sink}/resume",
    response_model=nouns.Sink,
    responses=refusals(404, 409),
    tags=["sinks"],
    summary="Resume a sink",
)
def resume_sink(write: Writing, sink: SinkName, asked: Deed) -> Response:
    """Go on with a sink that was paused."""
    return write.showing(
        lambda desk: desk.office.resume_sink(sink, reason=asked.reason), lambda desk: desk.office.sink(sink)
    )


@router.get(
    "/audit", response_model=nouns.AuditLines, responses=refusals(paged=True), tags=["audit"], summary="Read the audit"
)
def list_audit(
    request: Request,
    desk: AtDesk,
    *,
    actor: Words = None,
    action: Words = None,
    request_id: Words = None,
    limit: Limit = 50,
    after: Number = None,
) -> Response:
    """Return who did what to what, why, and how it was before and after; the newest first."""
    before = None if after is None else int(after)
    found = desk.office.audit(limit=limit, before_id=before, actor=actor, action=action, request_id=request_id)
    return page(request, Page(tuple(found), str(found[-1].id) if len(found) == limit else None))


@router.get(
    "/audit/verify", response_model=nouns.Verified, responses=refusals(), tags=["audit"], summary="Verify the audit"
)
def verify_audit(
    desk: AtDesk, anchor: Annotated[str | None, Query(max_length=200, description="an anchor of before")] = None
) -> Response:
    """Read every line, and return where the audit was tampered with."""
    problems = desk.office.verify_audit(anchor)
    return answer({"intact": not problems, "problems": problems})


@router.get(
    "/audit/anchor", response_model=nouns.Anchor, responses=refusals(), tags=["audit"], summary="Anchor the audit"
)
def get_anchor(desk: AtDesk) -> Response:
    """Return where the audit ends now, to be kept outside of the database and given to /audit/verify."""
    return answer({"anchor": desk.office.audit_anchor()})


@router.get(
    "/tokens", response_model=nouns.many(nouns.Token), responses=refusals(), tags=["tokens"], summary="List tokens"
)
def list_tokens(desk: AtDesk) -> Response:
    """Return who may come in: tokens, passwords and sessions, without any secret."""
    return answer(desk.office.tokens())


@router.post(
    "/tokens",
    status_code=201,
    response_model=nouns.NewToken,
    responses=refusals(),
    tags=["tokens"],
    summary="Add a token",
)
def add_token(desk: AtDesk, asked: AddToken) -> Response:
    """Let somebody in. The answer is not kept for an Idempotency-Key: a secret is told once."""
    end, reason = asked.until(), asked.reason
    return answer(
        desk.office.new_token(asked.name, role=asked.role, queues=asked.queues, expires=end, reason=reason), 201
    )


@router.delete(
    "/tokens/{token_id}", status_code=204, responses=refusals(404), tags=["tokens"], summary="Revoke a token"
)
def revoke_token(
    write: Writing,
    token_id: Annotated[int, Path(ge=1, le=LARGEST_ID, description="the id of a token")],
    reason: ReasonAsked,
) -> Response:
    """Let a token, a password or a session in no more; the sessions that it opened end with it."""
    return write(lambda desk: desk.office.revoke_token(token_id, reason=reason), 204)


@router.post(
    "/erasures", response_model=nouns.Erased, responses=refusals(404, 409), tags=["erasures"], summary="Erase a key"
)
def erase_key(write: Writing, asked: Erase) -> Response:
    """Erase payload, headers, key and error texts of the letters of a key; types, counts and times stay."""
    return write(lambda desk: {"letters": desk.letters.erase(asked.key, queue=asked.queue, reason=asked.reason)})
