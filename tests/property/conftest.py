"""Plain modules whose assertions explain themselves like a test's."""

import pytest

for _name in ("deferred_races", "model", "races", "segment_races", "sessions", "sleep_races", "world"):
    pytest.register_assert_rewrite(f"tests.property.{_name}")
