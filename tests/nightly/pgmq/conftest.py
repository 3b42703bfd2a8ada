"""Databases that have pgmq."""

import pytest


@pytest.fixture(scope="session")
def template(pgmq_template: str) -> str:
    return pgmq_template
