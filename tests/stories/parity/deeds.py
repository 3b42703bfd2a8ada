"""What an operator does, on each surface."""

from collections.abc import Mapping

from tests.stories.parity.row import Row, Why

_STEERS = Why("an agent looks and proposes; whoever steers is a person")
_SETUP = Why("an agent sets nothing up")
_HERE = "cannot be done to a database without"

DEEDS: Mapping[str, Row] = {
    "create_queue": Row(
        "create_queue(p_queue => {queue}, p_policy => {policy})",
        "queues create {queue} --policy {policy}",
        "POST /queues | name=queue policy",
        _SETUP,
    ),
    "configure_queue": Row(
        "configure_queue(p_queue => {queue}, p_policy => {policy})",
        "queues configure {queue} --policy {policy}",
        "PATCH /queues/{queue} | policy",
        _SETUP,
    ),
    "attach_pgmq": Row(
        "pgmq_attach(p_queue => {queue})",
        "queues attach {queue}",
        Why("it reads the tables of another product, and is done once, where the database is looked after"),
        _SETUP,
        untold=f"{_HERE} pgmq; tests/pgmq has it",
    ),
    "drop_queue": Row(
        "drop_queue(p_queue => {queue})", "queues drop {queue}", "DELETE /queues/{queue} | reason", _SETUP
    ),
    "pause_queue": Row(
        "pause_queue(p_queue => {queue}, p_until => {until})",
        "queues pause {queue} --until {until}",
        "POST /queues/{queue}/pause | until",
        _STEERS,
    ),
    "resume_queue": Row(
        "resume_queue(p_queue => {queue})", "queues resume {queue}", "POST /queues/{queue}/resume", _STEERS
    ),
    "force_breaker": Row(
        "force_breaker(p_queue => {queue})",
        "queues breaker {queue} open",
        "POST /queues/{queue}/open-breaker",
        _STEERS,
    ),
    "close_breaker": Row(
        "close_breaker(p_queue => {queue})",
        "queues breaker {queue} close",
        "POST /queues/{queue}/close-breaker",
        _STEERS,
    ),
    "send": Row(
        "send(p_queue => {queue}, p_payload => {payload}, p_key => {key})",
        "send {queue} {payload} --key {key}",
        "POST /queues/{queue}/messages | messages",
        Why("an agent makes no work"),
        signed=False,
    ),
    "send_many": Row(
        "send_many(p_queue => {queue}, p_messages => {messages})",
        "send {queue} --lines",
        "POST /queues/{queue}/messages | messages",
        Why("an agent makes no work"),
        signed=False,
    ),
    "discard": Row(
        "discard(p_ids => {message_ids}::bigint[])",
        "discard {message_ids} --yes",
        "POST /dead-letters/discard | ids=message_ids",
        _STEERS,
    ),
    "restore": Row(
        "restore(p_ids => {message_ids}::bigint[])",
        "restore {message_ids} --yes",
        "POST /dead-letters/restore | ids=message_ids",
        _STEERS,
    ),
    "hold": Row(
        "hold(p_ids => {message_ids}::bigint[])",
        "hold {message_ids} --yes",
        "POST /dead-letters/hold | ids=message_ids",
        _STEERS,
    ),
    "release held": Row(
        "hold(p_ids => {message_ids}::bigint[], p_on => false)",
        "hold --off {message_ids} --yes",
        "POST /dead-letters/release | ids=message_ids",
        _STEERS,
        python="hold",
    ),
    "replay": Row(
        "replay(p_ids => {message_ids}::bigint[])",
        Why("`replay ID` is a plan of one letter, so that it can be watched and paused like any other"),
        "POST /dead-letters/replay | ids=message_ids",
        Why("an agent proposes plans, of one letter or of many"),
    ),
    "erase_key": Row("erase_key(p_key => {key})", "erase --key {key} --yes", "POST /erasures | key", _STEERS),
    "acknowledge_group": Row(
        "acknowledge_group(p_group => {group_id}, p_owner => {owner})",
        "groups ack {group_id} --owner {owner}",
        "POST /groups/{group_id}/acknowledge | owner",
        _STEERS,
    ),
    "mute_group": Row(
        "mute_group(p_group => {group_id}, p_until => {until})",
        "groups mute {group_id} --until {until}",
        "POST /groups/{group_id}/mute | until",
        _STEERS,
    ),
    "resolve_group": Row(
        "resolve_group(p_group => {group_id}, p_version => {version})",
        "groups resolve {group_id} --in {version}",
        "POST /groups/{group_id}/resolve | version",
        _STEERS,
    ),
    "reopen_group": Row(
        "reopen_group(p_group => {group_id})", "groups reopen {group_id}", "POST /groups/{group_id}/reopen", _STEERS
    ),
    "merge_groups": Row(
        "merge_groups(p_groups => {group_ids}::bigint[], p_into => {into})",
        "groups merge {group_ids} --into {into}",
        "POST /groups/merge | groups=group_ids into",
        _STEERS,
    ),
    "split_group": Row(
        "split_group(p_group => {group_id}, p_path => {path}, p_value => to_jsonb({value}::text))",
        "groups split {group_id} {path}={value}",
        "POST /groups/{group_id}/split | path value",
        _STEERS,
    ),
    "remove_rule": Row(
        "remove_rule(p_rule => {rule_id})",
        "groups rules remove {rule_id}",
        "DELETE /group-rules/{rule_id} | reason",
        _STEERS,
    ),
    "plan_replay": Row(
        "plan_replay(p_filter => {filter})",
        "replay {filter} --yes --detach",
        "POST /replays | filter",
        "plan_replay | filter",
    ),
    "approve_replay": Row(
        "approve_replay(p_replay => {replay_id}, p_hash => {hash})",
        "replay approve {replay_id} --hash {hash}",
        "POST /replays/{replay_id}/approve | hash",
        Why("only a person approves"),
    ),
    "start_replay": Row(
        "start_replay(p_replay => {replay_id}, p_hash => {hash})",
        "replay start {replay_id} --hash {hash} --yes --detach",
        "POST /replays/{replay_id}/start | hash",
        "run_replay | replay_id hash",
    ),
    "pause_replay": Row(
        "pause_replay(p_replay => {replay_id})",
        "replay pause {replay_id}",
        "POST /replays/{replay_id}/pause",
        Why("an agent that has doubts cancels its plan"),
    ),
    "resume_replay": Row(
        "resume_replay(p_replay => {replay_id})",
        "replay resume {replay_id} --detach",
        "POST /replays/{replay_id}/resume",
        Why("whoever has paused it had a reason, and lets it go on"),
    ),
    "cancel_replay": Row(
        "cancel_replay(p_replay => {replay_id})",
        "replay cancel {replay_id}",
        "POST /replays/{replay_id}/cancel",
        "cancel_replay | replay_id",
    ),
    "put_sink": Row(
        "put_sink(p_sink => {name}, p_kind => {kind}, p_settings => {settings})",
        "sinks add {name} {kind}",
        "PUT /sinks/{name} | kind settings",
        _SETUP,
    ),
    "pause_sink": Row("pause_sink(p_sink => {name})", "sinks pause {name}", "POST /sinks/{name}/pause", _STEERS),
    "resume_sink": Row("resume_sink(p_sink => {name})", "sinks resume {name}", "POST /sinks/{name}/resume", _STEERS),
    "remove_sink": Row(
        "remove_sink(p_sink => {name})", "sinks remove {name} --yes", "DELETE /sinks/{name} | reason", _SETUP
    ),
    "emit_again": Row(
        "emit_again(p_sink => {sink}, p_references => {references})",
        "sinks reconcile {sink}",
        Why("it asks a bus what it has, and takes as long as that does: it is for a terminal"),
        _STEERS,
        untold=f"{_HERE} a bus; tests/relay/test_reconciling.py has it",
    ),
    "add_token": Row(
        "add_token(p_kind => {kind}, p_name => {name}, p_hash => {hash}, p_role => {role}, p_queues => null,"
        " p_expires => now() + interval '90 days')",
        "tokens add {name} --role {role} --json",
        "POST /tokens | name role",
        _SETUP,
    ),
    "revoke_token": Row(
        "revoke_token(p_id => {token_id})", "tokens revoke {token_id}", "DELETE /tokens/{token_id} | reason", _SETUP
    ),
    "drain_worker": Row(
        "drain_worker(p_name => {name})", "workers drain {name}", "POST /workers/{name}/drain", _STEERS
    ),
}
