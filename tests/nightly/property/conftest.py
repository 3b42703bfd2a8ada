"""The laboratory of tests/property."""

from tests.property.conftest import lab

__all__ = ["lab"]
