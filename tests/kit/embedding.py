"""The examples of applications that contain the console, and what must hold in each of them."""

import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

from bartleby import Client
from bartleby.surfaces.web.authenticating import COOKIE
from tests.kit.api import API, SAME, add_token, fill_queue

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "embed-the-console.md"
INSIDE = "/internal/bartleby"
FOREIGN: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://other.localhost"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    {"Sec-Fetch-Site": ""},
    *({"Origin": each} for each in ("https://evil.example", "null", "http://localhost.evil.example", "localhost", "",
        "http://localhost:9999", "http://localhost@evil.example", "file://localhost")),
]  # fmt: skip
"""Headers of requests from pages of other sites."""
LINK = re.compile(r'\b(?:href|src|action|hx-get|hx-post)="([^"]*)"')


def examples() -> dict[str, str]:
    found = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(found)


def sign_in(visitor: Any, name: str) -> None:
    """Sign in at the application, not at the console."""
    visitor.cookies.clear()
    if visitor.post(f"/sign-in/{name}").status_code == 404:  # in this example a middleware knows keys
        visitor.cookies.set("shop", f"key-of-{name}")


def check_users(visitor: Any, dsn: str) -> None:
    """Check that an application names its users to the console, and that every page and form is under the prefix."""
    letter, *_ = fill_queue(dsn)
    assert visitor.get(f"{INSIDE}{API}/queues").status_code == 401
    asked = visitor.get(f"{INSIDE}/letters?filter=queue:orders")
    assert asked.headers["location"].startswith(f"{INSIDE}/login?next=%2Finternal%2Fbartleby%2Fletters")
    sign_in(visitor, "eve")  # a user of the application without a role in the console
    assert visitor.get(f"{INSIDE}{API}/queues").status_code == 401
    token = {"name": "x", "role": "reader", "reason": "a test"}
    for user, status in (("ben", 403), ("ana", 201)):
        sign_in(visitor, user)
        assert visitor.get(f"{INSIDE}{API}/queues").json()[0]["name"] == "orders"
        assert visitor.post(f"{INSIDE}{API}/tokens", json=token, headers=SAME).status_code == status, user
        assert visitor.post(f"{INSIDE}{API}/tokens", json=token, headers=FOREIGN[0]).status_code == 403, user
    seen = walk(visitor, INSIDE)
    assert {f"{INSIDE}/{each}" for each in ("", "groups", "queues", "operations", "audit")} <= seen
    assert all(any(part in each for each in seen) for part in (f"{INSIDE}/letters", ".css", ".js"))
    assert "content-security-policy" not in visitor.get("/").headers
    path = f"{INSIDE}/letters/{letter}/discard"
    answer = visitor.post(path, data={"reason": "a test"}, headers=SAME)
    assert (answer.status_code, answer.headers["location"].startswith(f"{INSIDE}/letters")) == (303, True)
    notices = [each for each in answer.headers.get_list("set-cookie") if not each.startswith(COOKIE)]
    assert notices
    assert all(f"Path={INSIDE};" in f"{each};" for each in notices)
    for headers in (*FOREIGN, {}):  # a cookie of the application is guarded like one of the console
        assert visitor.post(path, data={"reason": "no"}, headers=headers).status_code == 403, headers
    with Client(dsn) as client:
        [line] = client.audit_log(limit=1, action="letter.discard")
    assert (line.actor, line.reason) == ("ana", "a test")


def check_sessions(visitor: Any, dsn: str) -> None:
    """Check that tokens and sessions of the console work in an application."""
    visitor.cookies.clear()
    token = add_token(dsn, "operator")
    document = visitor.get(f"{INSIDE}{API}/openapi.json", headers={"Authorization": f"Bearer {token}"}).json()
    assert document["servers"][0]["url"] == INSIDE
    assert "/api/v1/queues" in document["paths"]
    answer = visitor.post(f"{INSIDE}/login", data={"secret": token, "next": f"{INSIDE}/groups"}, headers=SAME)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{INSIDE}/groups")
    assert cookie_of(answer, COOKIE)[1]["path"] == INSIDE
    assert visitor.get(f"{INSIDE}/groups").status_code == 200
    assert visitor.post(f"{INSIDE}/logout", headers=SAME).headers["location"] == f"{INSIDE}/login"
    assert visitor.get(f"{INSIDE}/groups").status_code == 303


def walk(visitor: Any, prefix: str) -> set[str]:
    """Follow every link of the console; each must stay under the prefix and lead to a page."""
    waiting, seen = {f"{prefix}/"}, set[str]()
    while waiting - seen and len(seen) < 40:
        path = min(waiting - seen, key=lambda each: ("?" in each, len(each), each))  # filters have no end
        seen.add(path)
        answer = visitor.get(path)
        assert answer.status_code == 200, path
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        whole = "<html" in answer.text  # the rest are parts of pages
        assert not whole or f'data-root="{prefix}"' in answer.text, "scripts would use another address"
        found = {unescape(each) for each in LINK.findall(answer.text)}
        inside = {each for each in found if each and each[0] not in "#?"}
        assert [each for each in inside if not f"{each}/".startswith(f"{prefix}/")] == [], path
        posted = {each for each in inside if f'action="{each}"' in answer.text}
        waiting |= {each.partition("#")[0] for each in inside - posted if "/live" not in each}
    return seen


def cookie_of(answer: Any, name: str) -> tuple[str, Mapping[str, str]]:
    """Return the value of a cookie that is set, and its attributes."""
    [found] = [each for each in answer.headers.get_list("set-cookie") if each.startswith(f"{name}=")]
    value, *attributes = found.split("; ")
    pairs = (each.partition("=") for each in attributes)
    return value.partition("=")[2], {key.lower(): text for key, _, text in pairs}
