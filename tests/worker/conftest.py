"""Limits that hold on a busy machine: what users want done within seconds may take half a minute here."""

import pytest

from bartleby import janitor, replaying, worker
from tests.kit import worker as kit


@pytest.fixture(autouse=True)
def patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops waits for its last claims and settlements, its duties, and handlers that are about to end."""
    monkeypatch.setattr(worker, "_LAST_WORDS", kit.LONG)
    monkeypatch.setattr(janitor, "_LEAVE_SECONDS", kit.LONG)
    monkeypatch.setattr(replaying, "_LEAVE_SECONDS", kit.LONG)
    monkeypatch.setattr(kit, "GRACE_SECONDS", kit.LONG)
