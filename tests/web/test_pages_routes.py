"""Pages over HTTP, without a browser: assets for ever, deeds only by POST, notices once, other sites turned away."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.surfaces.web import ConsoleSettings, console
from bartleby.surfaces.web.pages.assets import asset
from tests.kit.burying import bury
from tests.web.conftest import SAME, ClientAs, add_token, visiting


@pytest.fixture
def site(dsn: str) -> Iterator[TestClient]:
    app = console(dsn, ConsoleSettings(authenticate=False))
    with TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 50000)) as made:
        yield made


def test_assets_are_kept_for_ever_packed_and_never_stale(site: TestClient) -> None:
    for name in ("console.css", "console.js", "vendor/htmx.min.js", "vendor/uplot.min.js", "mark.svg"):
        answer = site.get(asset(name))
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert site.get(asset("console.css")).headers["content-encoding"] == "gzip"
    plain = site.get(asset("console.css"), headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    # a page that was open before an upgrade asks by the old name
    old = site.get("/static/0123456789abcdef/console.css")
    assert (old.status_code, old.headers["cache-control"]) == (200, "no-cache")
    for path in ("/static/x/../settings.py", "/static/x/%2e%2e/settings.py", "/static/x/", "/static/x/nothing.js"):
        assert site.get(path).status_code == 404


def test_every_page_has_the_policy_and_is_not_kept(site: TestClient, client: Client) -> None:
    bury(client, [{"n": 1}])
    for path in ("/", "/groups", "/letters", "/letters/1", "/operations", "/queues", "/queues/orders", "/workers",
                 "/sinks", "/audit", "/doctor"):  # fmt: skip
        answer = site.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"


def test_a_deed_is_told_once_and_never_done_by_looking(site: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    assert site.get(f"/letters/{letter}/discard").status_code == 405
    done = site.post(f"/letters/{letter}/discard", data={"reason": "<b>spam</b>"}, headers=SAME)
    assert done.status_code == 200
    assert f"Letter {letter} is discarded." in done.text
    assert "<b>spam</b>" not in done.text
    assert "is discarded." not in site.get(f"/letters/{letter}").text


def test_what_was_done_is_told_where_it_was_done_and_not_to_a_tab_that_looks_again(
    site: TestClient, client: Client
) -> None:
    (letter,) = bury(client, [{"n": 1}])
    site.post(f"/letters/{letter}/discard", data={"reason": "spam"}, headers=SAME, follow_redirects=False)
    new = "/letters/new?since=2026-01-01T00:00:00Z"
    for path, target in (("/", "section#verdict"), (f"/letters/{letter}", "div#page"), (new, "div#newer")):
        part = site.get(path, headers={"HX-Request": "true", "HX-Target": target})
        assert part.status_code == 200
        assert "is discarded." not in part.text
        assert "set-cookie" not in part.headers
    whole = {"HX-Request": "true", "HX-Target": "main#main"}
    shown = site.get(f"/letters/{letter}", headers=whole).text
    assert f"Letter {letter} is discarded." in shown
    assert ">Undo<" in shown
    assert "is discarded." not in site.get(f"/letters/{letter}", headers=whole).text


def test_what_is_missing_in_a_form_is_told_in_plain_words(site: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    for headers in (SAME, {**SAME, "HX-Request": "true"}):
        told = site.post(f"/letters/{letter}/discard", headers=headers)
        assert told.status_code == 422
        assert "Reason: it is missing" in told.text
        assert "ody" not in told.text.partition('class="notice bad"')[2].partition("</div>")[0]
    asked = {"deed": "hold", "reason": "x" * 2000, "expected": "many", "ids": ["a", "b"]}
    told = site.post("/letters/deed", data=asked, headers=SAME)
    for words in (
        "Reason: it is too long",
        "Expected: it has to be a whole number",
        "Ids: it has to be a whole number",
    ):
        assert told.text.count(words) == 1, words


def test_a_page_of_another_site_does_nothing(site: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
        answer = site.post(f"/letters/{letter}/discard", data={"reason": "x"}, headers=headers)
        assert answer.status_code == 403
    found = client.dead_letter(letter)
    assert found is not None
    assert found.status == "dead"


def test_a_forged_notice_is_only_text(site: TestClient) -> None:
    for forged in ("nonsense", "eyJ0ZXh0IjogIjxzY3JpcHQ-IiwgInRvbmUiOiAiZ29vZCJ9", "W10="):
        site.cookies.set("bartleby_told", forged)
        answer = site.get("/queues")
        assert answer.status_code == 200
        assert "<script>" not in answer.text.partition("</head>")[2]
        site.cookies.clear()


def test_errors_of_forms_are_notices_and_of_pages_are_pages(site: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    patch = {"reason": "x", "payload": "{"}
    notice = site.post(f"/letters/{letter}/edit", data=patch, headers={**SAME, "HX-Request": "true"})
    assert (notice.status_code, notice.headers["hx-retarget"]) == (422, "#notices")
    assert "not JSON" in notice.text
    whole = site.post(f"/letters/{letter}/edit", data=patch, headers=SAME)
    assert whole.status_code == 422
    assert "<h1>" in whole.text
    assert "not JSON" in whole.text
    for path in ("/letters/999999", "/groups/999999", "/operations/999999", "/queues/nothing"):
        assert site.get(path).status_code in {404, 409}, path


def test_an_empty_filter_never_means_everything(site: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    assert site.post("/letters/confirm", data={"deed": "discard", "filter": " "}, headers=SAME).status_code == 422
    assert site.post("/operations", data={"reason": "x", "filter": ""}, headers=SAME).status_code >= 400
    answer = site.post(
        "/letters/deed", data={"deed": "discard", "filter": "", "expected": "3", "reason": "x"}, headers=SAME
    )
    assert answer.status_code == 422
    assert {getattr(client.dead_letter(each), "status", None) for each in letters} == {"dead"}


def test_what_went_wrong_on_a_page_is_in_the_log(
    site: TestClient, client: Client, conn: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("""
        create or replace function bartleby.resume_queue(p_queue text, p_actor text default null,
          p_reason text default null, p_request_id text default null) returns void language plpgsql
        as $$ begin raise exception 'out of order' using errcode = 'XX000'; end $$""")
    conn.commit()
    answer = site.post("/queues/orders/resume", data={"reason": "x"}, headers=SAME)
    assert answer.status_code == 500
    (line,) = [each.getMessage() for each in caplog.records if "out of order" in each.getMessage()]
    assert line.startswith(answer.headers["x-request-id"])


def test_a_database_without_a_schema_is_said_to_answer(site: TestClient, conn: psycopg.Connection[Any]) -> None:
    conn.execute("drop schema bartleby cascade")
    conn.commit()
    page = site.get("/groups").text
    assert "bartleby install" in page
    assert "pg_isready" not in page


def test_only_who_signed_in_here_can_log_out(dsn: str, guarded: FastAPI, client_as: ClientAs) -> None:
    reader = client_as("reader")
    assert "Log out" not in reader.get("/queues").text
    token = add_token(dsn, "operator")
    guest = visiting(guarded)
    assert guest.post("/login", data={"secret": token, "next": "/"}, headers=SAME).status_code == 303
    assert "Log out" in guest.get("/queues").text
