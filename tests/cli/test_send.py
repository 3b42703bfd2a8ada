"""`bartleby send`: a payload as an argument, from standard input, or one a line."""

import re
from typing import Any

from bartleby import Client
from tests.cli.conftest import Run


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
    document = bartleby("explain", sent.strip(), "--json").document["message"]
    assert {"key": "order-1", "headers": {"type": "made", "a": "b=c"}, "max_attempts": 2}.items() <= document.items()
    assert client.queues()[0].deferred == 1


def test_lines_are_sent_in_bulks_and_a_bad_line_is_named(bartleby: Run, client: Client) -> None:
    done = bartleby("send", "orders", "--lines", stdin="".join(f"{number}\n\n" for number in range(1500)))
    assert [int(line) for line in done.out.split()] == list(range(1, 1501))
    assert payloads(client) == list(range(1500))
    for lines, text, sent in (
        ("1\n\n2\nthree\n", "line 4 is not JSON: .*; nothing was sent", 0),
        ("1\n\nNaN\n", "line 3: invalid message: .*; nothing was sent", 0),
        ("1\n" * 1005 + "x\n", "line 1006 is not JSON: .*; the 1000 messages before line 1001 were sent", 1000),
    ):
        done = bartleby("send", "orders", "--lines", stdin=lines)
        assert (done.code, len(done.out.split()), len(payloads(client))) == (1, sent, sent), text
        assert re.search(text, done.err), done.err


def test_what_cannot_be_sent_is_refused_with_a_hint(bartleby: Run, client: Client) -> None:
    for words, stdin, problem in (
        (["orders", "hello"], "", "the payload is not JSON: .*\nhint: a text needs its quotes: '\"hello\"'"),
        (["orders", "NaN"], "", "invalid message: .*\nhint: .*finite numbers"),
        (["orders", "[" * 10_000], "", "the payload is not JSON"),
        (["orders"], b'"\xff"', "standard input is not text"),
        (["nowhere", "1"], "", "unknown queue: 'nowhere'\nhint: .*bartleby queues create"),
        (["orders", "1", "--max-attempts", "99999999999"], "", "out of range"),
    ):
        done = bartleby("send", *words, stdin=stdin)
        assert (done.code, done.out) == (1, ""), words
        assert re.match(f"bartleby: .*{problem}", done.err), words
    for misused in (["--header", "x"], ["--header", "=x"], ["--lines"], ["--delay", "soon"], ["2"]):
        assert bartleby("send", "orders", "1", *misused).code == 2, misused
    assert payloads(client) == []
