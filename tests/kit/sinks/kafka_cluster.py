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
        """Make a topic, and return its name."""
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
        """End freeze()."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")


def library() -> ctypes.CDLL:
    """Return the librdkafka that confluent-kafka brings, whose mock cluster it does not offer to Python."""
    found = importlib.util.find_spec("confluent_kafka")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent.with_name("confluent_kafka.libs")
    made = ctypes.CDLL(str(next(folder.glob("librdkafka*"))))
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
        ("conf_new", pointer, []),
        ("conf_set", number, [pointer, text, text, text, ctypes.c_size_t]),
        ("new", pointer, [number, pointer, text, ctypes.c_size_t]),
        ("mock_cluster_new", pointer, [pointer, number]),
        ("mock_cluster_bootstraps", text, [pointer]),
        ("mock_topic_create", number, [pointer, text, number, number]),
        ("mock_topic_set_error", None, [pointer, text, number]),
        ("mock_broker_set_up", number, [pointer, ctypes.c_int32]),
        ("mock_broker_set_down", number, [pointer, ctypes.c_int32]),
        ("mock_clear_request_errors", None, [pointer, ctypes.c_int16]),
        ("mock_push_request_errors_array", None, [pointer, ctypes.c_int16, ctypes.c_size_t, pointer]),
    ):
        function = getattr(made, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    return made


def serve() -> None:
    """Run a cluster, and do what standard input says."""
    rdkafka = library()
    error = ctypes.create_string_buffer(512)
    settings = rdkafka.rd_kafka_conf_new()
    rdkafka.rd_kafka_conf_set(settings, b"bootstrap.servers", b"127.0.0.1:1", error, len(error))
    cluster = rdkafka.rd_kafka_mock_cluster_new(rdkafka.rd_kafka_new(0, settings, error, len(error)), BROKERS)
    say(rdkafka.rd_kafka_mock_cluster_bootstraps(cluster).decode())
    for line in sys.stdin:
        match line.split():
            case ["topic", name, partitions]:
                rdkafka.rd_kafka_mock_topic_create(cluster, name.encode(), int(partitions), BROKERS)
            case ["refuse", name, code]:
                rdkafka.rd_kafka_mock_topic_set_error(cluster, name.encode(), int(code))
            case ["fail", code, times]:
                codes = (ctypes.c_int * int(times))(*[int(code)] * int(times))
                rdkafka.rd_kafka_mock_push_request_errors_array(cluster, PRODUCE, len(codes), codes)
            case ["relent"]:
                rdkafka.rd_kafka_mock_clear_request_errors(cluster, PRODUCE)
            case ["up" | "down" as way]:
                getattr(rdkafka, f"rd_kafka_mock_broker_set_{way}")(cluster, EVERY_BROKER)
            case _:
                return
        say("done")


def say(line: str) -> None:
    """Answer an order."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
