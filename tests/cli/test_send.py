"""`bartleby send`: a payload as an argument, from standard input, or one a line."""

import re
from typing import Any

from bartleby import Client
from tests.cli.conftest import Run
from tests.kit.commands import HOSTILE


def payloads(client: Client) -> list[Any]:
    lease = client.claim("orders", "w", limit=10_000)
    return [message.payload for message in lease or ()]


def test_payload_is_an_argument_or_standard_input(bartleby: Run, client: Client) -> None:
    assert bartleby("send", "orders", '{"a": 1}').out == "1\n"
    assert bartleby("send", "orders", stdin='["ü"]\n').out == "2\n"
    assert bartleby("send", "orders", "-", stdin="null").out == "3\n"
    assert payloads(client) == [{"a": 1}, ["ü"], None]
    options = ["--key", "order-1", "--header", "type=made", "--header", "a=b=c", "--max-attempts", "2"]
    sent = bartleby("send", "orders", "1", *options, "--unique-for", "60").out
    assert bartleby("send", "orders", "2", *options, "--unique-for", "60").out == sent
    assert bartleby("send", "orders", "3", "--delay", "3600").code == 0
    lease = client.claim("orders", "w", limit=10)
    assert lease is not None
    [message] = lease
    assert (message.key, message.headers) == ("order-1", {"type": "made", "a": "b=c"})
    assert bartleby("explain", sent.strip(), "--json").document["message"]["max_attempts"] == 2
    assert client.queues()[0].deferred == 1


def test_lines_are_sent_in_bulks_and_a_bad_line_is_named(bartleby: Run, client: Client) -> None:
    done = bartleby("send", "orders", "--lines", stdin="".join(f"{number}\n\n" for number in range(2500)))
    assert [int(line) for line in done.out.split()] == list(range(1, 2501))
    assert payloads(client) == list(range(2500))
    for lines, text, sent in (
        ("1\n\n2\nthree\n", "line 4 is not JSON: .*; nothing was sent", 0),
        ("1\n\nNaN\n", "line 3: invalid message: .*; nothing was sent", 0),
        ("1\n" * 1005 + "x\n", "line 1006 is not JSON: .*; the 1000 messages before line 1001 were sent", 1000),
        ("1\n" * 1001 + '"' + "x" * 2**20 + '"\n', "line 1002: payload and headers have", 1000),
    ):
        done = bartleby("send", "orders", "--lines", stdin=lines)
        assert (done.code, len(done.out.split())) == (1, sent), text
        assert re.search(text, done.err), done.err
        assert len(payloads(client)) == sent, text


def test_what_cannot_be_sent_is_refused_with_a_hint(bartleby: Run, client: Client) -> None:
    for words, stdin, problem, hint in (
        (["orders", "hello"], "", "the payload is not JSON", "a text needs its quotes: '\"hello\"'"),
        (["orders"], "", "the payload is not JSON", "quotes"),
        (["orders", "NaN"], "", "invalid message", "finite numbers"),
        (["orders", "[" * 10_000], "", "the payload is not JSON", "quotes"),
        (["orders", "1" * 5000], "", "the payload is not JSON", "quotes"),
        (["orders"], b'"\xff"', "standard input is not text", None),
        (["orders", '"\udcff"'], "", "lone surrogate", None),
        (["nowhere", "1"], "", "unknown queue: 'nowhere'", "bartleby queues create"),
        ([HOSTILE, "1"], "", "unknown queue", "bartleby queues create"),
        (["orders", "1", "--delay", "-5"], "", "a delay is between 0 and 100 years", None),
        (["orders", "1", "--unique-for", "5"], "", "unique_for needs a key", None),
        (["orders", "1", "--max-attempts", "99999999999"], "", "out of range", None),
    ):
        done = bartleby("send", *words, stdin=stdin)
        assert (done.code, done.out) == (1, ""), words
        first, *more = done.err.splitlines()
        assert first.startswith("bartleby: "), words
        assert problem in first, words
        assert bool(more) == bool(hint), words
        assert hint is None or (more[0].startswith("hint: ") and hint in more[0]), words
    for misused in (["--header", "x"], ["--header", "=x"], ["--lines"], ["--delay", "soon"], ["2"]):
        assert bartleby("send", "orders", "1", *misused).code == 2, misused
    assert payloads(client) == []
