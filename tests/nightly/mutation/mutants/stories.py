"""Bugs that stories of decisions and unit tests caught; the tests that catch them now."""

from tests.nightly.mutation.mutant import Mutant

MUTANTS = [
    Mutant(
        "the first failure of a second cycle has the time of the first cycle",
        "sql/dead_letters.sql",
        "excluded.reason, excluded.first_failed_at,\n",
        "excluded.reason, l.first_failed_at,\n",
        "tests/stories/test_seeds.py::test_history_entry_has_a_fixed_shape_and_a_bounded_size",
    ),
    Mutant(
        "headers of the sender hide where a copy comes from",
        "sql/dead_letters.sql",
        "    'original_queue', p_queue,\n",
        "    'original_queue', coalesce(p_headers ->> 'original_queue', p_queue),\n",
        "tests/stories/test_seeds.py::test_copy_in_a_channel_needs_no_table_and_its_headers_cannot_be_misleading",
    ),
    Mutant(
        "what is unacceptable is not routed without invalid_to",
        "sql/dead_letters.sql",
        "then coalesce(p_queue.invalid_to, p_queue.dead_letter_to)",
        "then p_queue.invalid_to",
        "tests/sql/test_fail.py::test_rejected_message_is_kept_and_its_copy_follows_the_route",
    ),
    Mutant(
        "a message of pgmq is read once more than its policy allows",
        "sql/pgmq.sql",
        "if read_ct > v_queue.max_attempts or",
        "if read_ct > v_queue.max_attempts + 1 or",
        "tests/stories/test_seeds_pgmq.py::test_sixth_read_promotes_what_failed_five_times",
    ),
    Mutant(
        "a failure in pgmq backs off as if it were the first",
        "sql/pgmq_work.sql",
        "bartleby.retry_delay($1, m.read_ct)) as again_at",
        "interval '0') as again_at",
        "tests/pgmq/test_boundary.py::test_failed_message_is_hidden_for_the_backoff",
    ),
    Mutant(
        "a date in a dataclass is sent as it is",
        "plain.py",
        "            return value.isoformat()\n",
        "            return value\n",
        "tests/client/test_typed_sending.py::test_typed_payload_arrives_as_its_type",
    ),
    Mutant(
        "an outcome that a handler returns is ignored",
        "execute.py",
        "            return self.judge(message, error)\n        return None if answer is None else "
        "self._returned(message, answer)\n\n    async def run_batch",
        "            return self.judge(message, error)\n        return None\n\n    async def run_batch",
        "tests/worker/test_outcomes.py::test_each_outcome_is_settled",
    ),
    Mutant(
        "an exception of a batch leaves its messages without an outcome",
        "execute.py",
        "        return dict.fromkeys(ids, error)\n",
        "        return {}\n",
        "tests/worker/test_batches.py::test_exception_fails_the_whole_batch_in_one_transaction",
    ),
]
