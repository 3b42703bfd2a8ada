"""Every fixture that more than one folder uses comes from tests/kit.

One exception: tests/nightly/property runs the lab of tests/property for longer.
"""

import pytest

pytest.register_assert_rewrite("tests.kit", "tests.property", "tests.nightly", "tests.stories")
pytest_plugins = ["tests.kit.database", "tests.kit.fixtures", "tests.kit.lanes"]
