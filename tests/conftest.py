"""Every fixture that more than one folder uses comes from tests/kit.

The exceptions are folders of tests/nightly that run a part of the gate elsewhere or for longer: `property` and
`mutation` the lab of tests/property, `buses` the conformance suite of tests/sinks.
"""

import pytest

pytest.register_assert_rewrite("tests.kit", "tests.property", "tests.nightly", "tests.stories")
pytest_plugins = ["tests.kit.database", "tests.kit.fixtures", "tests.kit.lanes"]
