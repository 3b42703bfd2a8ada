"""Bugs in send.sql."""

from tests.nightly.mutation.mutant import Mutant

MUTANTS = [
    Mutant(
        "a lapsed unique key still returns the first message",
        "sql/send.sql",
        "    where u.until <= v_now;\n",
        "    where false;\n",
        "tests/sql/test_send.py::test_second_send_of_a_unique_key_returns_the_first_id_until_it_lapses",
    ),
]
