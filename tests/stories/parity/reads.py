"""Reads of an operator on each surface."""

from collections.abc import Mapping

from tests.stories.parity.row import Row, Why

_TELLS = Why("part of `explain`")
_INSIDE = Why("about the installation, not about letters: not for agents")
_MADE_UP = Why("put together from find_message, attempts, dead_letter, message_replays and message_deeds")
_IN_GROUP = Why("part of get_group")

READS: Mapping[str, Row] = {
    "queues": Row("from queues", "queues --json", "GET /queues", "list_queues", more=("GET /queues/{queue}",),
        pick=("name", "ready", "leased", "deferred", "dead", "paused", "breaker")),
    "dead_letters": Row(
        "from dead_letters where message_id in (select message_id from bartleby.find_letters({filter}))",
        "dead {filter} --json", "GET /dead-letters | filter", "list_dead_letters | filter",
        more=("GET /dead-letters/export",), pick=("message_id", "queue", "status", "reason", "attempts", "cycle")),
    "count_letters": Row("from count_letters({filter})", "dead {filter} --count --json",
        "GET /dead-letters/count | filter", "count_dead_letters | filter", pick=("letters", "exact")),
    "dead_letter": Row("from dead_letters where message_id = {message_id}", "dead {message_id} --json",
        "GET /dead-letters/{message_id}", "get_dead_letter | message_id",
        more=("POST /dead-letters/{message_id}/reveal",),
        pick=("message_id", "queue", "status", "reason", "attempts", "cycle", "generation")),
    "attempts": Row("from attempts where message_id = {message_id}", _TELLS,
        "GET /dead-letters/{message_id}/attempts", _TELLS, pick=("message_id", "attempt", "error_type")),
    "find_message": Row("from messages where message_id = {message_id}", _TELLS, "GET /messages/{message_id}", _TELLS,
        pick=("message_id", "queue", "state", "attempts", "cycle")),
    "explain": Row(_MADE_UP, "explain {message_id} --json", "GET /messages/{message_id}/story",
        "explain | message_id", python=_MADE_UP, pick=("message_id", "state")),
    "groups": Row("from groups where queue = {queue} and dead > 0", "groups --queue {queue} --json",
        "GET /groups | queue", "list_groups | queue",
        pick=("id", "queue", "state", "dead", "replayed", "resolved", "discarded")),
    "group": Row("from groups where id = {group_id}", "groups show {group_id} --json", "GET /groups/{group_id}",
        "get_group | group_id", more=("GET /groups/{group_id}/portrait",),
        pick=("id", "queue", "state", "dead", "replayed", "resolved", "discarded")),
    "shared_values": Row("from shared_values({group_id})", Why("part of `groups show`"),
        "GET /groups/{group_id}/shared-values", _IN_GROUP, pick=("path", "letters", "of")),
    "group_rules": Row("from group_rules", "groups rules --json", "GET /group-rules",
        Why("the rules do not change what an agent reads"), pick=("id", "queue", "from_group", "to_group", "path")),
    "replays": Row("from replays", "replay list --json", "GET /replays", Why("replay_status shows a plan by its id"),
        pick=("id", "status", "items", "done", "died_again", "skipped")),
    "find_replay": Row("from replays where id = {replay_id}", "replay show {replay_id} --json",
        "GET /replays/{replay_id}", "replay_status | replay_id", more=("GET /replays/{replay_id}/preview",),
        pick=("id", "status", "items", "done", "died_again", "skipped")),
    "replay_items": Row("from replay_items where replay_id = {replay_id}", "replay items {replay_id} --json",
        "GET /replays/{replay_id}/items", Why("replay_status counts them"),
        pick=("message_id", "queue", "state", "prediction")),
    "replay_changes": Row("from replay_change({replay_id}, ({message_ids}::bigint[])[1])",
        Why("`replay show` shows what a patch changes in the first letter, and so does `replay --patch --dry-run`"),
        "GET /replays/{replay_id}/changes | message_id=message_ids", Why("an agent proposes no patches"),
        pick=("before", "after", "problem")),
    "sinks": Row("from sinks", "sinks --json", "GET /sinks", _INSIDE, more=("GET /sinks/{sink}",),
        pick=("name", "kind", "state")),
    "workers": Row("from workers", "workers --json", "GET /workers", _INSIDE,
        pick=("name", "kind", "state", "running")),
    "tokens": Row("from tokens", "tokens --json", "GET /tokens", _INSIDE, pick=("kind", "name", "role")),
    "audit_log": Row("from audit_log where action = {action}", "audit --action {action} --json",
        "GET /audit | action", _INSIDE, pick=("action", "reason")),
    "verify_audit": Row("from verify_audit()", "audit verify --json", "GET /audit/verify", _INSIDE,
        pick=("problem",)),
    "audit_anchor": Row("from audit_anchor() a (anchor)", "audit anchor", "GET /audit/anchor", _INSIDE,
        pick=("anchor",)),
}  # fmt: skip
