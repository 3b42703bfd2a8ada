"""Limits that hold on a busy machine."""

import pytest

from bartleby import relay
from tests.kit.worker import LONG


@pytest.fixture(autouse=True)
def patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that stops waits for its last reports and releases."""
    monkeypatch.setattr(relay, "_LAST_WORDS", LONG)
