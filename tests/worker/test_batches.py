"""Batch handlers: a list of messages in, an outcome for each out; a message that is not mentioned has failed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from bartleby import AlreadyHandled, Bartleby, Done, Message, Retry, Snooze, Terminal
from tests.kit.sql import value
from tests.kit.worker import BOTH, Conn, FailingTerminal, HostileAnswer, drain, handler_of, state, until, working


@dataclass
class Order:
    id: int


def batch_handler(app: Bartleby, answer: Any, *, awaited: bool, queue: str = "orders", **options: Any) -> None:
    """Create a queue, and register a batch handler that answers with answer(messages)."""
    app.client.create_queue(queue)
    function = handler_of(answer, awaited=awaited, takes=list[Message])
    app.handler(queue, **{"batch": 10, "concurrency": 1, "retry": {"max_attempts": 1}, **options})(function)


def send(app: Bartleby, count: int, queue: str = "orders") -> list[int]:
    return list(app.send_many(queue, [{"payload": {"id": number}} for number in range(count)]))


def errors(app: Bartleby, ids: list[int]) -> list[str | None]:
    """Return the error type of the first failed attempt of each message; None if there was none."""
    return [attempts[0].error_type if (attempts := app.client.attempts(each)) else None for each in ids]


@BOTH
def test_each_message_is_settled_by_its_own_outcome(app: Bartleby, conn: Conn, awaited: bool) -> None:
    outcomes: list[object] = [None, Done, Done(), Retry(after=3000), Retry, Snooze(3000)]
    outcomes += [Terminal("no"), Terminal, AlreadyHandled(), ValueError("x"), 5, "not mentioned"]

    def answer(messages: list[Message]) -> object:
        return {each.id: outcomes[each.payload["id"]] for each in messages if each.payload["id"] != 11}

    batch_handler(app, answer, awaited=awaited, batch=12, retry={"backoff": "fixed", "base": 3000})
    ids = send(app, 12)
    assert drain(app) == {"done": 4, "retried": 5, "released": 1, "dead": 2}
    retry, terminal, none = "bartleby.Retry", "bartleby.Terminal", "bartleby.execute.NoOutcome"
    expected = [None, None, None, retry, retry, None, terminal, terminal, None, "ValueError", none, none]
    assert errors(app, ids) == expected
    assert state(conn) == (0, 0, 6, 2)
    texts = [app.client.attempts(each)[0].error or "" for each in ids[10:]]
    assert "something that is no outcome (int)" in texts[0]
    assert "said nothing about this message; it returns a mapping" in texts[1]


def test_outcomes_come_in_any_shape(app: Bartleby) -> None:
    def judge(message: Message) -> object:
        return Done() if message.payload["id"] % 2 else Terminal()

    def yields(messages: list[Message]) -> Iterator[object]:
        yield from map(judge, messages)

    shapes: dict[str, Callable[[list[Message]], object]] = {
        "list": lambda messages: [judge(each) for each in messages],
        "view": lambda messages: {each.id: judge(each) for each in messages}.values(),
        "by_message": lambda messages: {each: judge(each) for each in messages},
        "generator": yields,
    }
    sent = {}
    for number, (shape, answer) in enumerate(shapes.items()):
        batch_handler(app, answer, awaited=number % 2 == 0, queue=shape)
        sent[shape] = send(app, 4, shape)
    app.handler("yields", batch=10, concurrency=1)(yields)
    app.client.create_queue("yields")
    sent["yields"] = send(app, 4, "yields")
    assert drain(app) == {"done": 10, "dead": 10}
    for shape, ids in sent.items():
        assert [error is None for error in errors(app, ids)] == [False, True, False, True], shape


def endless(messages: list[Message]) -> Iterator[Done]:
    while True:
        yield Done()


def breaks_off(messages: list[Message]) -> Iterator[Done]:
    yield Done()
    yield Done()
    raise ValueError("half-way")


class Broken(Mapping[int, object]):
    def __getitem__(self, key: int) -> object:
        raise RuntimeError("broken")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("broken")

    def __len__(self) -> int:
        raise RuntimeError("broken")


def raising(error: BaseException) -> Callable[[object], None]:
    def answer(_: object) -> None:
        raise error

    return answer


ANSWERS: dict[str, tuple[Any, int]] = {
    # name: what the handler does with four messages, how many of them are done then
    "none": (lambda _: None, 0),
    "number": (lambda _: 5, 0),
    "bytes": (lambda _: b"done", 0),
    "empty": (lambda _: [], 0),
    "short": (lambda _: [Done()], 1),
    "unknown_keys": (lambda _: {"1": Done(), None: 1}, 0),
    "endless": (endless, 4),
    "breaks_off": (breaks_off, 0),
    "broken_mapping": (lambda _: Broken(), 0),
    "hostile_values": (lambda messages: {message.id: HostileAnswer() for message in messages}, 0),
    "hostile_key": (lambda _: {HostileAnswer(): 1}, 0),
    "failing_terminal": (lambda messages: [FailingTerminal for _ in messages], 0),
    "exit": (raising(SystemExit(1)), 0),
    "already_handled_without_id": (raising(AlreadyHandled()), 0),
    "already_handled_of_another_queue": (raising(AlreadyHandled("elsewhere", message_id=1 << 40)), 0),
}


@BOTH
def test_senseless_and_hostile_answers_leave_nothing_unsettled(app: Bartleby, conn: Conn, awaited: bool) -> None:
    for name, (answer, _) in ANSWERS.items():
        batch_handler(app, answer, awaited=awaited, queue=name)
        app.client.configure_queue(name, {"breaker": "off"})
        send(app, 4, name)
    counts = drain(app)
    for name, (_, done) in ANSWERS.items():
        assert state(conn, name) == (0, 0, 0, 4 - done), name
    assert counts == {"done": 5, "dead": 4 * len(ANSWERS) - 5}
    query = "select count(*) from bartleby.dead_letters where error like '%%not of a message in it%%'"
    assert value(conn, query) == 8


@BOTH
def test_exception_fails_the_whole_batch_in_one_transaction(app: Bartleby, conn: Conn, awaited: bool) -> None:
    batch_handler(app, raising(ValueError("the bank is closed")), awaited=awaited)
    ids = send(app, 5)
    assert drain(app) == {"dead": 5}
    assert errors(app, ids) == ["ValueError"] * 5
    query = "select count(distinct fingerprint), bool_and(traceback is not null) from bartleby.attempts"
    assert conn.execute(query).fetchone() == (1, True)
    assert value(conn, "select count(distinct xmin::text) from bartleby.attempt") == 1


@BOTH
def test_unfit_payload_is_rejected_and_the_others_are_run(app: Bartleby, awaited: bool) -> None:
    seen: list[list[Order]] = []

    def answer(orders: list[Order]) -> list[Done]:
        seen.append(orders)
        return [Done() for _ in orders]

    for queue in ("some", "all"):
        app.handler(queue, batch=10, concurrency=1)(handler_of(answer, awaited=awaited, takes=list[Order]))
        app.client.create_queue(queue)
    ids = app.send_many("some", [{"payload": {"id": number if number % 3 else "x"}} for number in range(6)])
    app.send_many("all", [{"payload": "x"}] * 3)
    assert drain(app) == {"done": 4, "dead": 5}
    assert seen == [[Order(1), Order(2), Order(4), Order(5)]]
    reasons = [letter.reason if (letter := app.client.dead_letter(each)) else None for each in ids]
    assert reasons == ["unacceptable", None, None, "unacceptable", None, None]


@BOTH
def test_batch_with_a_message_that_was_handled_before_is_run_again_without_it(
    app: Bartleby, conn: Conn, awaited: bool
) -> None:
    """mark_handled raises for one message, and the transaction of all of them is rolled back."""
    rounds: list[list[int]] = []

    def answer(messages: list[Message]) -> list[None]:
        rounds.append([message.id for message in messages])
        with psycopg.connect(str(app.settings.dsn)) as mine:
            for message in messages:
                app.mark_handled(message, mine)
        return [None for _ in messages]

    batch_handler(app, answer, awaited=awaited)
    ids = send(app, 4)
    conn.execute("select bartleby.mark_handled('orders', 'orders', %s)", [f"id:{ids[1]}"])
    assert drain(app) == {"done": 4, "released": 3}
    assert rounds[0] == ids
    assert sorted(each for later in rounds[1:] for each in later) == [ids[0], ids[2], ids[3]]
    assert value(conn, "select count(*) from bartleby.attempts") == 0
    assert state(conn) == (0, 0, 0, 0)


@BOTH
def test_batch_is_full_if_there_are_messages_enough_and_does_not_wait_for_them(app: Bartleby, awaited: bool) -> None:
    """Also if a batch is larger than a claim usually is."""
    sizes: list[int] = []

    def answer(messages: list[Message]) -> list[None]:
        sizes.append(len(messages))
        return [None for _ in messages]

    batch_handler(app, answer, awaited=awaited, batch=60)
    send(app, 120)
    with working(app, claim_limit=10) as running:
        until(lambda: running.worker.counts["done"] == 120)
        for number in range(121, 124):
            app.send("orders", number)
            until(lambda: running.worker.counts["done"] == number)  # noqa: B023 - at once
    assert (sizes[0], sizes[-3:]) == (60, [1, 1, 1])
