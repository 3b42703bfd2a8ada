"""What Ctrl-C does to something that is under way."""

import io
import signal
import sys

import pytest

from bartleby.surfaces.cli.progress import Stop, interrupts


class Busy(io.StringIO):
    """A stream in the middle of a write."""

    def write(self, _text: str) -> int:
        raise RuntimeError("reentrant call")


def test_the_first_interruption_stops_and_the_second_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    stop = Stop()
    before = signal.getsignal(signal.SIGINT)
    with interrupts(stop, lambda: "stopping"):
        assert not stop.wait(0)
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == "\nstopping\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interruption_in_the_middle_of_a_write_is_told_all_the_same(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Busy())
    with interrupts(Stop(), lambda: "stopping"):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping\n"


def test_a_time_stops_too() -> None:
    assert not Stop(60).wait(0)
    assert Stop(0.01).wait(10)
