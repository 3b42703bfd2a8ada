"""How much surfaces take on: nobody has it all, and nobody waits for themselves."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby.principal import Principal, Role
from bartleby.surfaces.limits import Streams
from bartleby.surfaces.web.attending import Attendance
from bartleby.surfaces.web.door import Door
from bartleby.surfaces.web.settings import ConsoleSettings

EVA = Principal("eva", Role.READER)


@pytest.mark.parametrize("readers", [3, 4, 5, 6, 10, 20])
@pytest.mark.parametrize("operators", [1, 5, 20])
def test_however_many_connections_there_are_one_principal_leaves_one_to_others(readers: int, operators: int) -> None:
    house: Any = SimpleNamespace(settings=ConsoleSettings(readers=readers, operators=operators))
    door = Door(house, house)
    assert door._changing.each + door._looking.each < readers


@pytest.mark.parametrize("limit", [Streams(4), Attendance()])
def test_a_stream_may_end_in_the_middle_of_a_count(limit: Streams | Attendance) -> None:
    """Garbage is collected anywhere, and may be a stream that never began."""

    def end_one() -> None:
        with limit._lock, limit.held("eva") if isinstance(limit, Streams) else limit.at("/groups/1", EVA):
            pass

    ending = threading.Thread(target=end_one, daemon=True)
    ending.start()
    ending.join(15)
    assert not ending.is_alive(), "it waits for itself"
