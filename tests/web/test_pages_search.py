"""A search that looks at many letters in vain is shown as it goes on, and neither loses nor repeats any."""

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import psycopg
import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.surfaces.web.pages import letters as page
from tests.kit.burying import bury


def look_at_two(conn: psycopg.Connection[Any]) -> None:
    """Let searches walk, and end early: after two letters that do not fit, and not after 100,000."""
    query = "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'bartleby'::regnamespace and proname = %s"
    for name, many in (("search", "100000"), ("walk", "500"), ("few_letters", "20000")):
        for (text,) in conn.execute(query, [name]).fetchall():
            assert many in text
            conn.execute(text.replace(many, "2"))
    conn.commit()


def parts(browser: TestClient, path: str | None) -> Iterator[str]:
    """Yield a page, and what it asks for by itself until there is no more."""
    while path:
        yield (text := browser.get(path).text)
        onward = re.search(r'hx-get="(/letters\?[^"]*)" hx-trigger="load,', text)
        path = unescape(onward[1]) if onward else None


def ids(text: str) -> list[int]:
    return [int(each) for each in re.findall(r'name="ids" value="(\d+)"', text)]


@pytest.fixture
def rare(client: Client, conn: psycopg.Connection[Any]) -> list[int]:
    """Five letters, each after three that died of something else."""
    found = []
    for _ in range(5):
        bury(client, [{"n": n} for n in range(3)])
        found += bury(client, [{"n": 3}], error="rare")
    look_at_two(conn)
    return found


@pytest.mark.parametrize("sort", ["newest", "oldest", "id", "-id"])
def test_the_first_answer_does_not_wait_and_the_rest_follows(browser: TestClient, rare: list[int], sort: str) -> None:
    shown = list(parts(browser, f"/letters?filter=error:rare&sort={sort}&show=version"))
    wanted = rare if sort in {"oldest", "id"} else rare[::-1]
    assert [each for text in shown for each in ids(text)] == wanted
    assert ids(shown[0]) != wanted
    assert all(re.search("Looked (back|up) to ", text) for text in shown[:-1])
    assert "Looked" not in shown[-1]
    assert "<strong>5</strong> found<" in shown[-1]
    assert " found so far<" in shown[0]
    # without scripts there is a link
    link = re.search(r'<a href="(/letters\?[^"]*)">Look further', shown[0])
    assert link is not None
    assert "have=" not in link[1]


def test_a_page_is_full_at_some_time_and_the_next_goes_on_after_it(
    browser: TestClient, rare: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_PAGE", 3)
    *_, last = shown = list(parts(browser, "/letters?filter=error:rare"))
    assert [each for text in shown for each in ids(text)] == rare[:1:-1]
    onward = re.search(r'rel="next" href="([^"]*)"', last)
    assert onward is not None
    assert "<strong>3+</strong> found " in last
    rest = list(parts(browser, unescape(onward[1])))
    assert [each for text in rest for each in ids(text)] == rare[1::-1]
    assert 'hx-select-oob="#paging"' in rest[0], "how many there are was told with the first page"
    assert not any("No letter fits" in text for text in rest)


def test_that_no_letter_fits_is_said_when_all_were_looked_at(browser: TestClient, rare: list[int]) -> None:
    *before, last = parts(browser, "/letters?filter=error:nobody")
    assert len(before) >= 2
    assert not any("No letter fits" in each for each in before)
    assert "No letter fits" in last
