"""/api/v1/dead-letters: find, look, take along, and what is done to some."""

import csv
import io
import json

import psycopg
import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, BIG, SECRET, get, post, said, shop
from tests.kit.burying import bury, statuses
from tests.web.conftest import ClientAs


def test_a_page_of_letters_leads_to_the_next_by_cursor_and_by_link(browser: TestClient, dsn: str) -> None:
    ids = shop(dsn, letters=5)
    found: list[int] = []
    after: dict[str, str] = {}
    for _ in range(3):
        answer = browser.get(f"{API}/dead-letters", params={"sort": "id", "limit": 2, **after})
        page = said(answer)
        found += [each["message_id"] for each in page["items"]]
        if page["next"] is None:
            assert "link" not in answer.headers
            break
        link, rel = answer.headers["link"].split("; ")
        assert rel == 'rel="next"'
        assert said(browser.get(f"{API}/dead-letters{link.strip('<>')}"))["items"][0]["message_id"] == found[-1] + 1
        after = {"after": page["next"]}
    assert found == ids


def test_a_filter_finds_and_a_wrong_one_is_pointed_at(browser: TestClient, dsn: str) -> None:
    ids = shop(dsn)
    assert [each["message_id"] for each in get(browser, "/dead-letters", filter="payload.n:1")["items"]] == [ids[1]]
    problem = get(browser, "/dead-letters", 422, filter="queue:orders age:1x")
    assert (problem["type"], problem["position"]) == ("urn:bartleby:invalid-filter", 18)
    assert problem["pointed"].splitlines()[1].index("^") == 17
    assert problem["hint"].startswith("write age:>1h")


def test_whoever_is_held_to_queues_is_pointed_at_what_they_wrote(client_as: ClientAs, dsn: str) -> None:
    shop(dsn)
    held = client_as("reader", ["orders"])
    assert get(held, "/dead-letters", 422, filter="queue:orders age:1x")["position"] == 18


def test_letters_are_counted(browser: TestClient, dsn: str) -> None:
    shop(dsn)
    assert get(browser, "/dead-letters/count", filter="queue:orders") == {"letters": 3, "exact": True}


@pytest.mark.parametrize("number", ["1e400", str(BIG), "0.10000000000000000000000000000001", "-0", "1E+3"])
def test_every_digit_of_a_payload_survives_there_and_back(browser: TestClient, dsn: str, number: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        body = f'{{"messages": [{{"payload": {{"n": {number}}}, "headers": {{"h": {number}}}}}]}}'
        answer = browser.post(
            f"{API}/queues/orders/messages", content=body, headers={"Content-Type": "application/json"}
        )
        message_id = said(answer, 201)["message_ids"][0]
        stored = client.find_message(message_id)
        assert stored is not None
        kept = json.loads(stored.raw, parse_int=str, parse_float=str)["n"]
        with psycopg.connect(dsn) as connection:
            row = connection.execute("select (%s::jsonb)::text", [number]).fetchone()
        assert row is not None
        assert kept == row[0]
        alive = browser.get(f"{API}/messages/{message_id}").text
        assert f'"payload": {{"n": {kept}}}' in alive
        lease = client.claim("orders", "web-1")
        assert lease is not None
        client.reject(lease.id, lease.messages[0].position, "unacceptable", "no")
    dead = browser.get(f"{API}/dead-letters/{message_id}").text
    assert f'"payload": {{"n": {kept}}}' in dead
    assert f'"headers": {{"h": {kept}}}' in dead


def test_a_letter_has_a_tag_and_is_not_sent_twice(browser: TestClient, dsn: str) -> None:
    first, *_ = shop(dsn)
    path = f"{API}/dead-letters/{first}"
    answer = browser.get(path)
    tag = answer.headers["etag"]
    again = browser.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    post(browser, "/dead-letters/hold", ids=[first])
    changed = browser.get(path, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.headers["etag"] != tag) == (200, True)


def test_a_letter_that_is_not_there_is_a_problem(browser: TestClient) -> None:
    problem = get(browser, "/dead-letters/99", 404)
    assert (problem["type"], problem["status"]) == ("urn:bartleby:unknown-message", 404)
    assert get(browser, "/dead-letters/99/attempts", 404)["status"] == 404
    assert get(browser, "/messages/99/story", 404)["status"] == 404
    assert get(browser, "/messages/99", 404)["status"] == 404
    assert get(browser, "/dead-letters/0", 422)["errors"][0]["where"] == "path.message_id"
    assert get(browser, f"/dead-letters/{2**63}", 422)["status"] == 422


def test_attempts_and_story_tell_what_happened(browser: TestClient, dsn: str) -> None:
    first, *_ = shop(dsn)
    (attempt,) = get(browser, f"/dead-letters/{first}/attempts")
    assert (attempt["error_type"], attempt["verdict"]) == ("KeyError", "dead")
    story = get(browser, f"/messages/{first}/story")
    assert (story["state"], story["dead_letter"]["message_id"], len(story["attempts"])) == ("dead", first, 1)
    assert story["next"]


class TestSecrets:
    def test_they_are_hidden_and_revealed_to_whoever_may_with_a_line_in_the_audit(
        self, client_as: ClientAs, dsn: str
    ) -> None:
        with Client(dsn) as client:
            client.create_queue("orders")
            (one,) = bury(client, [{"password": SECRET, "n": BIG}], headers={"authorization": SECRET})
            operator, reader = client_as("operator"), client_as("reader")
            assert SECRET not in operator.get(f"{API}/dead-letters/{one}").text
            assert post(reader, f"/dead-letters/{one}/reveal", 403)["type"] == "urn:bartleby:forbidden"
            letter = post(operator, f"/dead-letters/{one}/reveal", reason="looking for the cause")
            assert letter["payload"] == {"password": SECRET, "n": BIG}
            assert letter["headers"] == {"authorization": SECRET}
            (line,) = client.audit_log(action="payload.reveal")
        assert (line.actor, line.reason, line.subject) == (
            "operator", "looking for the cause", {"message_id": one, "queue": "orders"},
        )  # fmt: skip

    @pytest.mark.parametrize("filter", ["payload.password:x", 'payload."pass\\word":x', "PAYLOAD.a.api_key:>1"])
    def test_they_cannot_be_guessed_by_a_filter(self, client_as: ClientAs, dsn: str, filter: str) -> None:
        shop(dsn)
        assert get(client_as("reader"), "/dead-letters", 403, filter=filter)["type"] == "urn:bartleby:forbidden"
        assert get(client_as("operator"), "/dead-letters", filter=filter)["items"] == []


class TestExport:
    def test_json_lines_are_the_letters(self, browser: TestClient, dsn: str) -> None:
        ids = shop(dsn)
        answer = browser.get(f"{API}/dead-letters/export", params={"sort": "id"})
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert 'filename="dead-letters.jsonl"' in answer.headers["content-disposition"]
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [each["message_id"] for each in lines] == ids
        assert lines[0] == get(browser, f"/dead-letters/{ids[0]}")

    def test_no_cell_is_a_formula(self, browser: TestClient, dsn: str) -> None:
        with Client(dsn) as client:
            client.create_queue("orders")
            bury(client, ["=cmd|'/c calc'!A1"], error="=1+1", key="@SUM(A1)")
        answer = browser.get(f"{API}/dead-letters/export", params={"format": "csv"})
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        head, row = csv.reader(io.StringIO(answer.text, newline=""))
        cells = dict(zip(head, row, strict=True))
        assert (cells["error"], cells["key"]) == ("'=1+1", "'@SUM(A1)")
        assert not any(cell.startswith(("=", "+", "-", "@", "\t")) for cell in row)

    def test_a_wrong_filter_is_a_problem_before_anything_is_sent(self, browser: TestClient) -> None:
        assert get(browser, "/dead-letters/export", 422, filter="nonsense:")["type"] == "urn:bartleby:invalid-filter"

    def test_nothing_found_is_an_empty_file(self, browser: TestClient) -> None:
        assert browser.get(f"{API}/dead-letters/export").content == b""
        table = browser.get(f"{API}/dead-letters/export", params={"format": "csv"}).text
        assert table.startswith("message_id,queue,")
        assert table.count("\n") == 1


class TestDeeds:
    def test_letters_are_discarded_and_restored_by_ids(self, browser: TestClient, dsn: str) -> None:
        ids = shop(dsn)
        done = post(browser, "/dead-letters/discard", ids=[*ids[:2], 999])
        assert (done["asked"], done["changed"], done["refusals"]) == (3, 2, 1)
        assert done["refused"][0]["message_id"] == 999
        with Client(dsn) as client:
            assert statuses(client, ids) == ["discarded", "discarded", "dead"]
            assert post(browser, "/dead-letters/restore", ids=ids[:2])["changed"] == 2
            assert statuses(client, ids) == ["dead"] * 3
            assert [each.reason for each in client.audit_log(action="letter.restore")] == ["a test"]

    def test_a_filter_does_nothing_unless_it_finds_as_many_as_were_looked_at(
        self, browser: TestClient, dsn: str
    ) -> None:
        shop(dsn)
        problem = post(browser, "/dead-letters/discard", 409, filter="queue:orders", expected=2)
        assert problem["type"] == "urn:bartleby:plan-drifted"
        assert post(browser, "/dead-letters/discard", filter="queue:orders", expected=3)["changed"] == 3
        assert post(browser, "/dead-letters/restore", filter="queue:orders", expected=3)["changed"] == 3

    def test_letters_are_held_and_released(self, browser: TestClient, dsn: str) -> None:
        first, *_ = shop(dsn)
        assert post(browser, "/dead-letters/hold", ids=[first])["changed"] == 1
        assert get(browser, f"/dead-letters/{first}")["held_by"]
        assert post(browser, "/dead-letters/discard", ids=[first])["refusals"] == 1
        assert post(browser, "/dead-letters/release", ids=[first])["changed"] == 1
        assert get(browser, f"/dead-letters/{first}")["held_by"] is None

    def test_a_few_are_replayed_at_once(self, browser: TestClient, dsn: str) -> None:
        ids = shop(dsn)
        assert post(browser, "/dead-letters/replay", ids=ids[:2])["message_ids"] == ids[:2]
        assert get(browser, f"/messages/{ids[0]}")["state"] == "ready"
        assert post(browser, "/dead-letters/replay", 422, ids=list(range(1, 102)))["status"] == 422

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"ids": []},
            {"ids": ["1"]},
            {"ids": [0]},
            {"ids": [2**63]},
            {"ids": [1], "filter": "queue:a", "expected": 1},
            {"filter": "queue:orders"},
            {"ids": [1], "reason": " "},
            {"ids": [1], "surprise": True},
            {"filter": "", "expected": 3},
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, browser: TestClient, dsn: str, body: dict[str, object]) -> None:
        ids = shop(dsn)
        assert post(browser, "/dead-letters/discard", 422, **body)["status"] == 422
        with Client(dsn) as client:
            assert statuses(client, ids) == ["dead"] * 3

    def test_a_body_that_no_python_takes_apart_is_refused(self, browser: TestClient) -> None:
        for body in ["{", "[" * 100_000, '{"ids": [' + "9" * 5000 + "]}", '{"reason": "\\ud800", "ids": [1]}', "\xff"]:
            answer = browser.post(
                f"{API}/dead-letters/discard", content=body.encode("latin-1"),
                headers={"Content-Type": "application/json"},
            )  # fmt: skip
            assert answer.status_code in {400, 422}
            assert answer.headers["content-type"] == "application/problem+json"
