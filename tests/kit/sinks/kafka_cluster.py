"""A Kafka cluster for tests: librdkafka's own mock of three brokers, in a process of its own so that it can be frozen.

It speaks Kafka's protocol on real sockets, with topics, partitions, leaders, acks and idempotent producers. It is no
broker all the same: it has its records in memory and no replicas that could lag, knows nothing of TLS, SASL and access
rights, sets no limit to the size of records, and cannot find one by its time. What it would answer for some of that
can be ordered, error by error.

Run as a program it takes orders on standard input, one a line, and ends with it.
"""

import ctypes
import importlib.util
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.kit.sinks.servers import freeze

BROKERS = 3
EVERY_BROKER = -1
PARTITIONS = 4
PRODUCE = 0  # the number of that request in the protocol


class Cluster:
    """Three brokers. They are up; the address stays the same."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.brokers = self._read()

    def topic(self, partitions: int = PARTITIONS) -> str:
        name = f"events-{uuid.uuid4().hex[:12]}"
        self.order(f"topic {name} {partitions}")
        return name

    def order(self, line: str) -> None:
        """Have it do one of these.

        up, down                     accept connections, or refuse them and close what is open; records are kept
        refuse TOPIC ERROR           answer requests for the topic with this error; NO_ERROR ends it
        fail ERROR TIMES             answer the next requests to produce with this error
        relent                       answer requests to produce properly again
        topic NAME PARTITIONS        make a topic
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._read() == "done"

    def freeze(self) -> None:
        """Accept connections and bytes, and answer nothing."""
        freeze(self._process)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")


class Library:
    """The librdkafka that confluent-kafka brings, whose mock cluster it does not offer to Python."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("confluent_kafka")
        assert found is not None
        assert found.origin is not None
        folder = Path(found.origin).parent.with_name("confluent_kafka.libs")
        self._loaded = ctypes.CDLL(str(next(folder.glob("librdkafka*"))))

    def make(self, name: str, *arguments: object) -> ctypes.c_void_p:
        function = getattr(self._loaded, f"rd_kafka_{name}")
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        getattr(self._loaded, f"rd_kafka_{name}")(*arguments)


def serve() -> None:
    """Run a cluster, and do what standard input says."""
    rdkafka, error, size = Library(), ctypes.create_string_buffer(512), ctypes.c_size_t(512)
    settings = rdkafka.make("conf_new")
    rdkafka.call("conf_set", settings, b"bootstrap.servers", b"127.0.0.1:1", error, size)
    cluster = rdkafka.make("mock_cluster_new", rdkafka.make("new", 0, settings, error, size), BROKERS)
    addresses = rdkafka.make("mock_cluster_bootstraps", cluster)
    say(ctypes.string_at(addresses).decode())
    for line in sys.stdin:
        match line.split():
            case ["topic", name, partitions]:
                rdkafka.call("mock_topic_create", cluster, name.encode(), int(partitions), BROKERS)
            case ["refuse", name, code]:
                rdkafka.call("mock_topic_set_error", cluster, name.encode(), int(code))
            case ["fail", code, times]:
                codes = (ctypes.c_int * int(times))(*[int(code)] * int(times))
                rdkafka.call("mock_push_request_errors_array", cluster, PRODUCE, ctypes.c_size_t(len(codes)), codes)
            case ["relent"]:
                rdkafka.call("mock_clear_request_errors", cluster, PRODUCE)
            case ["up" | "down" as way]:
                rdkafka.call(f"mock_broker_set_{way}", cluster, EVERY_BROKER)
            case _:
                return
        say("done")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
