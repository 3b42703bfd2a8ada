"""Names that are not operator verbs and so exist on some surfaces only; a comment says what they are for."""

from collections.abc import Mapping

VERBS = {
    # workers do it
    "claim", "start", "extend", "ack", "fail", "reject", "release", "idle", "channel", "reap", "turn", "lease_length",
    "outlook", "give_back", "server_trouble", "server_is_young", "open_breaker", "mark_handled", "watch",
    "handled_keys", "take_duty", "leave_duty", "prune", "regroup", "tally", "fates", "advance_replays",
    "report_worker", "leave_worker",
    # surfaces do it for their users
    "find_token", "find_password", "open_session", "close_session", "note", "take_answer", "keep_answer", "letter_ids",
    "drop_preview", "exclude_items",
    # part of `doctor`
    "version", "drift", "facts", "oldest_xmin_holder", "cost_of_queues", "segments", "expiring", "on_duty",
    "restless_groups", "last_message_id",
    # part of looking at a plan, a group or a message
    "replay_change", "replay_shares", "replay_obstacles", "replay_relapses", "group_versions", "group_replays",
    "message_replays", "message_deeds",
    # the relay does it
    "sink_settings", "cloud_events", "report_sink", "refuse_events", "emitted",
}  # fmt: skip
FUNCTIONS = {
    # workers do it, or it is part of a view
    "clock", "group_pulse", "queue_stats", "depth_elsewhere", "sink_facts",
    "oldest_waiting", "unsettled", "worker_leases", "server_started_at",
}  # fmt: skip
COMMANDS = {
    # the schema is there before any surface; the next ones run until they are ended
    "install", "upgrade", "uninstall", "sql", "dev", "demo", "console", "mcp", "work", "relay", "janitor",
    # about the machine that they run on: its terminal, its files, what it can reach; HTTP has /metrics
    "doctor", "repro", "replay watch", "sinks sync", "sinks test", "sinks metrics",
    # other names of `sinks`, `tokens` and `workers`, or one of them
    "sinks list", "sinks show", "tokens list", "workers list",
}  # fmt: skip
ROUTES = {
    "GET /health", "GET /openapi.json", "HEAD /openapi.json",
    # several reads in one
    "GET /overview", "GET /doctor", "GET /groups/{}/versions", "GET /groups/{}/replays",
}  # fmt: skip
PAGES: Mapping[str, str] = {
    "POST /audit/verify": "verify_audit", "POST /groups/{group_id}/acknowledge": "acknowledge_group",
    "POST /groups/{group_id}/merge": "merge_groups", "POST /groups/{group_id}/mute": "mute_group",
    "POST /groups/{group_id}/reopen": "reopen_group", "POST /groups/{group_id}/resolve": "resolve_group",
    "POST /groups/{group_id}/rules/{rule_id}/remove": "remove_rule", "POST /groups/{group_id}/split": "split_group",
    "POST /letters/confirm": "count_letters", "POST /letters/deed": "discard, restore, hold, release held",
    "POST /letters/{message_id}/discard": "discard", "POST /letters/{message_id}/edit": "plan_replay, start_replay",
    "POST /letters/{message_id}/hold": "hold, release held", "POST /letters/{message_id}/replay": "replay",
    "POST /letters/{message_id}/restore": "restore", "POST /letters/{message_id}/reveal": "dead_letter",
    "POST /operations": "plan_replay", "POST /operations/{replay_id}/again": "plan_replay",
    "POST /operations/{replay_id}/plan/approve": "approve_replay", "POST /operations/{replay_id}/start": "start_replay",
    "POST /operations/{replay_id}/{verb}": "pause_replay, resume_replay, cancel_replay",
    "POST /queues/{name}/pause": "pause_queue",
    "POST /queues/{name}/{verb}": "resume_queue, force_breaker, close_breaker",
    "POST /sinks/{name}/{verb}": "pause_sink, resume_sink", "POST /tokens": "add_token",
    "POST /tokens/{token_id}/revoke": "revoke_token", "POST /undo": "restore", "POST /workers/drain": "drain_worker",
    "GET /audit": "audit_log, audit_anchor", "GET /groups": "groups",
    "GET /groups/{group_id}": "group, shared_values, group_rules", "GET /letters": "dead_letters, count_letters",
    "GET /letters/{message_id}": "dead_letter, attempts, find_message, explain", "GET /operations": "replays",
    "GET /operations/{replay_id}": "find_replay, replay_items, replay_changes", "GET /queues": "queues",
    "GET /queues/{name}": "queues", "GET /sinks": "sinks", "GET /tokens": "tokens", "GET /workers": "workers",
}  # fmt: skip
"""Pages of the console, and the verbs of each."""
PARTS_OF_PAGES = {
    "GET /", "GET /doctor", "GET /groups/new", "GET /letters/new", "GET /letters/words", "GET /live",
    "GET /live/history", "GET /login", "GET /metrics", "GET /static/{version}/{name:path}", "POST /login",
    "POST /logout",
}  # fmt: skip
NOT_ON_PAGES = {
    # set up with the code; programs send; erasing is rare and irreversible: only at a terminal
    "create_queue", "configure_queue", "drop_queue", "attach_pgmq", "put_sink", "remove_sink", "emit_again", "send",
    "send_many", "erase_key",
}  # fmt: skip
