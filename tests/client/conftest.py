"""Limits that hold on a busy machine."""

import pytest


@pytest.fixture(autouse=True)
def patience(patient_worker: None) -> None:
    """Workers of this process give nothing up because the machine is slow."""
