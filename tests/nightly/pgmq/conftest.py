"""Databases that have pgmq, as in tests/pgmq."""

from tests.pgmq.conftest import template

__all__ = ["template"]
