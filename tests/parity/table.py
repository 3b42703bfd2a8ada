"""All rows."""

from collections.abc import Mapping

from tests.parity.deeds import DEEDS
from tests.parity.looks import LOOKS
from tests.parity.row import Row

ROWS: Mapping[str, Row] = {**DEEDS, **LOOKS}
