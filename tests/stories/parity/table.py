"""The table of verbs: each verb of an operator, and its name on every surface.

A name is written as it is used, with arguments in braces: `queues pause {queue}`, `POST /queues/{queue}/pause`. After
a bar stand the fields of a request or the arguments of a tool, `field=argument` where the names differ.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


class Why(str):
    """Why a surface has no such verb."""

    __slots__ = ()


@dataclass(frozen=True)
class Row:
    """One verb. `python` is its name in both clients, `more` are further names on HTTP.

    `pick` makes it a read: these members of its answer are compared. `untested` says why the story cannot do it.
    """

    sql: str
    cli: str
    http: str
    mcp: str
    python: str = ""
    more: tuple[str, ...] = ()
    pick: tuple[str, ...] = ()
    signed: bool = True
    untested: str = ""


_STEERS = Why("an agent reads and proposes; a person decides")
_SETUP = Why("an agent does not configure anything")
_HERE = "not possible in a database without"
_TELLS = Why("part of `explain`")
_INSIDE = Why("about the installation, not about letters: not for agents")
_MADE_UP = Why("put together from find_message, attempts, dead_letter, message_replays and message_deeds")
_IN_GROUP = Why("part of get_group")

ACTIONS: Mapping[str, Row] = {
    "create_queue": Row("create_queue(p_queue => {queue}, p_policy => {policy})",
        "queues create {queue} --policy {policy}", "POST /queues | name=queue policy", _SETUP),
    "configure_queue": Row("configure_queue(p_queue => {queue}, p_policy => {policy})",
        "queues configure {queue} --policy {policy}", "PATCH /queues/{queue} | policy", _SETUP),
    "attach_pgmq": Row("pgmq_attach(p_queue => {queue})", "queues attach {queue}",
        Why("it reads tables of another product, and is done once by the administrator of the database"), _SETUP,
        untested=f"{_HERE} pgmq; tests/pgmq has it"),
    "drop_queue": Row("drop_queue(p_queue => {queue})", "queues drop {queue}", "DELETE /queues/{queue} | reason",
        _SETUP),
    "pause_queue": Row("pause_queue(p_queue => {queue}, p_until => {until})", "queues pause {queue} --until {until}",
        "POST /queues/{queue}/pause | until", _STEERS),
    "resume_queue": Row("resume_queue(p_queue => {queue})", "queues resume {queue}", "POST /queues/{queue}/resume",
        _STEERS),
    "force_breaker": Row("force_breaker(p_queue => {queue})", "queues breaker {queue} open",
        "POST /queues/{queue}/open-breaker", _STEERS),
    "close_breaker": Row("close_breaker(p_queue => {queue})", "queues breaker {queue} close",
        "POST /queues/{queue}/close-breaker", _STEERS),
    "send": Row("send(p_queue => {queue}, p_payload => {payload}, p_key => {key})",
        "send {queue} {payload} --key {key}", "POST /queues/{queue}/messages | messages",
        Why("an agent sends no messages"), signed=False),
    "send_many": Row("send_many(p_queue => {queue}, p_messages => {messages})", "send {queue} --lines",
        "POST /queues/{queue}/messages | messages", Why("an agent sends no messages"), signed=False),
    "discard": Row("discard(p_ids => {message_ids}::bigint[])", "discard {message_ids} --yes",
        "POST /dead-letters/discard | ids=message_ids", _STEERS),
    "restore": Row("restore(p_ids => {message_ids}::bigint[])", "restore {message_ids} --yes",
        "POST /dead-letters/restore | ids=message_ids", _STEERS),
    "hold": Row("hold(p_ids => {message_ids}::bigint[])", "hold {message_ids} --yes",
        "POST /dead-letters/hold | ids=message_ids", _STEERS),
    "release held": Row("hold(p_ids => {message_ids}::bigint[], p_on => false)", "hold --off {message_ids} --yes",
        "POST /dead-letters/release | ids=message_ids", _STEERS, python="hold"),
    "replay": Row("replay(p_ids => {message_ids}::bigint[])",
        Why("`replay ID` is a plan of one letter, so that it can be watched and paused like any other"),
        "POST /dead-letters/replay | ids=message_ids", Why("an agent proposes plans, of one letter or of many")),
    "erase_key": Row("erase_key(p_key => {key})", "erase --key {key} --yes", "POST /erasures | key", _STEERS),
    "acknowledge_group": Row("acknowledge_group(p_group => {group_id}, p_owner => {owner})",
        "groups ack {group_id} --owner {owner}", "POST /groups/{group_id}/acknowledge | owner", _STEERS),
    "mute_group": Row("mute_group(p_group => {group_id}, p_until => {until})",
        "groups mute {group_id} --until {until}", "POST /groups/{group_id}/mute | until", _STEERS),
    "resolve_group": Row("resolve_group(p_group => {group_id}, p_version => {version})",
        "groups resolve {group_id} --in {version}", "POST /groups/{group_id}/resolve | version", _STEERS),
    "reopen_group": Row("reopen_group(p_group => {group_id})", "groups reopen {group_id}",
        "POST /groups/{group_id}/reopen", _STEERS),
    "merge_groups": Row("merge_groups(p_groups => {group_ids}::bigint[], p_into => {into})",
        "groups merge {group_ids} --into {into}", "POST /groups/merge | groups=group_ids into", _STEERS),
    "split_group": Row("split_group(p_group => {group_id}, p_path => {path}, p_value => to_jsonb({value}::text))",
        "groups split {group_id} {path}={value}", "POST /groups/{group_id}/split | path value", _STEERS),
    "remove_rule": Row("remove_rule(p_rule => {rule_id})", "groups rules remove {rule_id}",
        "DELETE /group-rules/{rule_id} | reason", _STEERS),
    "plan_replay": Row("plan_replay(p_filter => {filter})", "replay {filter} --yes --detach",
        "POST /replays | filter", "plan_replay | filter"),
    "approve_replay": Row("approve_replay(p_replay => {replay_id}, p_hash => {hash})",
        "replay approve {replay_id} --hash {hash}", "POST /replays/{replay_id}/approve | hash",
        Why("only a person approves")),
    "start_replay": Row("start_replay(p_replay => {replay_id}, p_hash => {hash})",
        "replay start {replay_id} --hash {hash} --yes --detach", "POST /replays/{replay_id}/start | hash",
        "run_replay | replay_id hash"),
    "pause_replay": Row("pause_replay(p_replay => {replay_id})", "replay pause {replay_id}",
        "POST /replays/{replay_id}/pause", Why("an agent that has doubts cancels its plan")),
    "resume_replay": Row("resume_replay(p_replay => {replay_id})", "replay resume {replay_id} --detach",
        "POST /replays/{replay_id}/resume", Why("the person who paused it resumes it")),
    "cancel_replay": Row("cancel_replay(p_replay => {replay_id})", "replay cancel {replay_id}",
        "POST /replays/{replay_id}/cancel", "cancel_replay | replay_id"),
    "put_sink": Row("put_sink(p_sink => {name}, p_kind => {kind}, p_settings => {settings})",
        "sinks add {name} {kind}", "PUT /sinks/{name} | kind settings", _SETUP),
    "pause_sink": Row("pause_sink(p_sink => {name})", "sinks pause {name}", "POST /sinks/{name}/pause", _STEERS),
    "resume_sink": Row("resume_sink(p_sink => {name})", "sinks resume {name}", "POST /sinks/{name}/resume", _STEERS),
    "remove_sink": Row("remove_sink(p_sink => {name})", "sinks remove {name} --yes", "DELETE /sinks/{name} | reason",
        _SETUP),
    "emit_again": Row("emit_again(p_sink => {sink}, p_references => {references})", "sinks reconcile {sink}",
        Why("it asks a bus what it has, and takes as long as that does: it is for a terminal"), _STEERS,
        untested=f"{_HERE} a bus; tests/relay/test_reconciling.py has it"),
    "add_token": Row("add_token(p_kind => {kind}, p_name => {name}, p_hash => {hash}, p_role => {role},"
        " p_queues => null, p_expires => now() + interval '90 days')", "tokens add {name} --role {role} --json",
        "POST /tokens | name role", _SETUP),
    "revoke_token": Row("revoke_token(p_id => {token_id})", "tokens revoke {token_id}",
        "DELETE /tokens/{token_id} | reason", _SETUP),
    "drain_worker": Row("drain_worker(p_name => {name})", "workers drain {name}", "POST /workers/{name}/drain",
        _STEERS),
}  # fmt: skip
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
ROWS: Mapping[str, Row] = {**ACTIONS, **READS}


def bare(surface: str, name: str, row: Row) -> set[str]:
    """Return the names of a verb on a surface; none if it does not have the verb."""
    value = getattr(row, surface)
    if isinstance(value, Why):
        return set()
    match surface:
        case "python":
            return {value or name}
        case "sql":
            return set(re.findall(r"bartleby\.(\w+)", value)) | {value.removeprefix("from ").split("(")[0].split()[0]}
        case "cli":
            return {value.partition(" --")[0].partition(" {")[0]}
        case "http":
            return {re.sub(r"\{\w+\}", "{}", each.partition(" |")[0]) for each in (value, *row.more)}
        case _:
            return {value.partition(" |")[0]}


def names(surface: str) -> set[str]:
    """Return all names of a surface in the table."""
    return {each for name, row in ROWS.items() for each in bare(surface, name, row)}
