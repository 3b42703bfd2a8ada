"""What every sink does, for the sinks whose server is a process of its own."""

import pytest

from tests.kit.sinks.conformance import Sink, harness
from tests.sinks.test_conformance import Conformance


class TestBuses(Conformance):
    @pytest.fixture(params=["nats", "rabbitmq", "redis", "kafka"])
    def kind(self, request: pytest.FixtureRequest) -> type[Sink]:
        return harness(request.param)
