"""Limits that hold on a busy machine."""

import pytest

from bartleby import relay
from tests.kit.worker import LONG


@pytest.fixture(autouse=True)
def patience(patient_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that stops waits for its last reports, and its leases do not lapse because they are renewed late."""
    monkeypatch.setattr(relay, "_LAST_WORDS", LONG)
    monkeypatch.setattr(relay, "_LEASE", 600.0)
