"""The check-up as a page: one check that takes too long does not hide the others."""

from collections.abc import Iterator

import psycopg
import pytest

from bartleby import Client
from bartleby.surfaces import checkup
from bartleby.surfaces.checkup import Finding


def test_a_check_that_takes_too_long_says_so_and_the_others_are_shown(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(_: Client) -> Iterator[Finding]:
        yield Finding("good", "letters", "so far")
        raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")

    slow.__name__ = "_letters"
    monkeypatch.setattr(checkup, "_letters", slow)
    client = Client(dsn)
    found = {each.check: each for each in checkup.examine(client)}
    client.close()
    assert found["letters"].status == "warning"
    assert "took longer" in found["letters"].text
    assert found["schema"].status == "good"
    assert "audit" in found
