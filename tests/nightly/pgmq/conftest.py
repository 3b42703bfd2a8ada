"""Databases that have pgmq, as in tests/pgmq."""

from tests.pgmq.conftest import bare, template

__all__ = ["bare", "template"]
