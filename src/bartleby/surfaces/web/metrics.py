"""GET /metrics: what Prometheus asks for, in its text format 0.0.4. Whoever is held to some queues sees only those."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from bartleby import measures
from bartleby.events import Sink
from bartleby.message import Queue
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import AtDesk, house
from bartleby.surfaces.web.paths import METRICS
from bartleby.surfaces.web.problems import responses
from bartleby.version import __version__

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
_BREAKER = ("off", "closed", "open", "half_open", "forced")
_SINK = ("working", "degraded", "paused")
_WORKER = ("working", "draining", "silent")

Sample = tuple[Mapping[str, str], float]

router = APIRouter(tags=["health"])


@router.get(
    METRICS,
    operation_id="metrics",
    summary="Everything that Prometheus wants to know",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **responses()},
)
def metrics(request: Request, desk: AtDesk) -> Response:
    """Return queues, dead letters, groups, replays, sinks and workers as numbers."""
    families = [*_of_queues(desk.queues.every()), *_of_groups(desk)]
    if desk.principal.queues is None:
        families += [*_of_replays(desk), *_of_sinks(desk.office.sinks()), *_of_workers(desk)]
    families.append(_family("bartleby_console_streams", "gauge", "Open streams of this console.",
                            [({}, house(request).streams.open)]))  # fmt: skip
    families.append(_family("bartleby_build_info", "gauge", "The version of this console.",
                            [({"version": __version__}, 1)]))  # fmt: skip
    return Response("".join(families), media_type=MEDIA)


def _of_queues(queues: Sequence[Queue]) -> Iterator[str]:
    now = datetime.now(UTC)

    def samples(value: str) -> list[Sample]:
        return [({"queue": each.name}, float(getattr(each, value))) for each in queues]

    yield _family("bartleby_queue_messages", "gauge", "Messages that are not settled, by where they are.",
                  [({"queue": each.name, "state": state}, getattr(each, state))
                   for each in queues for state in ("ready", "leased", "deferred")])  # fmt: skip
    yield _family("bartleby_dead_letters", "gauge", "Letters that are dead.", samples("dead"))
    yield _family("bartleby_queue_oldest_ready_age_seconds", "gauge", "For how long the oldest ready message waits.",
                  [({"queue": each.name}, _age(each.oldest_ready_at, now)) for each in queues])  # fmt: skip
    yield _family("bartleby_queue_paused", "gauge", "Whether a queue is paused.", samples("paused"))
    yield _family("bartleby_queue_breaker", "gauge", "1 for the state that a breaker is in.",
                  [({"queue": each.name, "state": state}, each.breaker == state)
                   for each in queues for state in _BREAKER])  # fmt: skip


def _of_groups(desk: Desk) -> Iterator[str]:
    found = desk.seat.looking().run(measures.group_states())
    yield _family("bartleby_groups", "gauge", "Groups of letters that died of the same, by state.",
                  [({"queue": queue, "state": state}, count)
                   for queue, state, count in found if desk.principal.sees(queue)])  # fmt: skip


def _of_replays(desk: Desk) -> Iterator[str]:
    found = desk.seat.looking().run(measures.replay_statuses())
    yield _family("bartleby_replays", "gauge", "Plans of replays, by status.",
                  [({"status": status}, count) for status, count in found])  # fmt: skip


def _of_sinks(sinks: Sequence[Sink]) -> Iterator[str]:
    now = datetime.now(UTC)

    def samples(value: str) -> list[Sample]:
        return [({"sink": each.name}, float(getattr(each, value))) for each in sinks]

    yield _family("bartleby_sink_waiting", "gauge", "References to events that wait for a sink.", samples("waiting"))
    yield _family("bartleby_sink_oldest_waiting_age_seconds", "gauge", "For how long the oldest of them waits.",
                  [({"sink": each.name}, _age(each.oldest_waiting_at, now)) for each in sinks])  # fmt: skip
    yield _family("bartleby_sink_refused", "gauge", "Events that a sink never takes.", samples("refused"))
    yield _family("bartleby_emit_published_total", "counter", "Events that a sink took.", samples("published"))
    yield _family("bartleby_emit_failures_total", "counter", "Events for which the attempts were used up.",
                  samples("failures"))  # fmt: skip
    yield _family("bartleby_sink_state", "gauge", "1 for the state that a sink is in.",
                  [({"sink": each.name, "state": state}, each.state == state)
                   for each in sinks for state in _SINK])  # fmt: skip


def _of_workers(desk: Desk) -> Iterator[str]:
    workers = desk.office.workers()
    count = Counter((each.kind, each.state) for each in workers)
    kinds = sorted({each.kind for each in workers} | {"worker"})
    yield _family("bartleby_workers", "gauge", "Workers that report, by state.",
                  [({"kind": kind, "state": state}, count[kind, state])
                   for kind in kinds for state in _WORKER])  # fmt: skip
    yield _family("bartleby_workers_running", "gauge", "Messages with handlers.",
                  [({"kind": kind}, sum(each.running for each in workers if each.kind == kind))
                   for kind in kinds])  # fmt: skip
    yield _family("bartleby_workers_concurrency", "gauge", "Messages that could be with handlers.",
                  [({"kind": kind}, sum(each.concurrency for each in workers if each.kind == kind))
                   for kind in kinds])  # fmt: skip


def _age(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


def _family(name: str, kind: str, help_: str, samples: Sequence[Sample]) -> str:
    lines = [f"# HELP {name} {help_}\n# TYPE {name} {kind}\n"]
    for labels, value in samples:
        said = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{said}}} {_number(value)}\n" if said else f"{name} {_number(value)}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)
