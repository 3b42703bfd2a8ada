"""Limits that hold on a busy machine: what users want done within seconds may take half a minute here."""

import pytest

from bartleby import holding, janitor, replaying, worker
from tests.kit import worker as kit


@pytest.fixture(autouse=True)
def patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops waits for its last claims and settlements, its duties, and handlers that are about to end."""
    monkeypatch.setattr(worker, "_LAST_WORDS", kit.LONG)
    monkeypatch.setattr(janitor, "_LEAVE_SECONDS", kit.LONG)
    monkeypatch.setattr(replaying, "_LEAVE_SECONDS", kit.LONG)
    monkeypatch.setattr(kit, "GRACE_SECONDS", kit.LONG)


@pytest.fixture(autouse=True)
def patient_solo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solo message waits until it can run alone, unless the test says otherwise."""
    monkeypatch.setattr(holding, "_PATIENT", kit.LONG)
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    monkeypatch.setattr(holding, "_ALONE_IN_A_ROW", 3600.0)
