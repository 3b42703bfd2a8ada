"""All rows."""

from collections.abc import Mapping

from tests.stories.parity.deeds import DEEDS
from tests.stories.parity.looks import LOOKS
from tests.stories.parity.row import Row

ROWS: Mapping[str, Row] = {**DEEDS, **LOOKS}
