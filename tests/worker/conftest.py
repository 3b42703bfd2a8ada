"""Limits that hold on a busy machine: what users want done within seconds may take half a minute here."""

import pytest

from tests.kit import worker as kit


@pytest.fixture(autouse=True)
def patience(patient_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that are about to end are waited for."""
    monkeypatch.setattr(kit, "GRACE_SECONDS", kit.LONG)
