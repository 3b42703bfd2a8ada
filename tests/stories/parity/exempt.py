"""Names that are not operator verbs and so exist on some surfaces only, with their purpose."""

from collections.abc import Mapping

_WORKER = "workers do it"
_SURFACES = "surfaces do it for their users"
_DOCTOR = "part of `doctor`"
_PLAN = "part of looking at a plan"
_GROUP = "part of looking at a group"
_STORY = "part of `explain`"
_RELAY = "the relay does it"

VERBS: Mapping[str, str] = {
    **dict.fromkeys(["claim", "start", "extend", "ack", "fail", "reject", "release", "idle", "channel"], _WORKER),
    **dict.fromkeys(["reap", "turn", "lease_length", "outlook", "open_breaker", "mark_handled", "watch"], _WORKER),
    **dict.fromkeys(["handled_keys", "take_duty", "leave_duty", "prune", "regroup", "tally", "fates"], _WORKER),
    **dict.fromkeys(["advance_replays", "report_worker", "leave_worker"], _WORKER),
    **dict.fromkeys(["find_token", "find_password", "open_session", "close_session", "note"], _SURFACES),
    **dict.fromkeys(["take_answer", "keep_answer", "letter_ids", "drop_preview", "exclude_items"], _SURFACES),
    **dict.fromkeys(["version", "drift", "facts", "oldest_xmin_holder", "segments", "expiring", "on_duty"], _DOCTOR),
    **dict.fromkeys(["restless_groups", "last_message_id"], _DOCTOR),
    **dict.fromkeys(["replay_change", "replay_shares", "replay_obstacles", "replay_relapses"], _PLAN),
    **dict.fromkeys(["group_versions", "group_replays"], _GROUP),
    **dict.fromkeys(["message_replays", "message_deeds"], _STORY),
    **dict.fromkeys(["sink_settings", "cloud_events", "report_sink", "refuse_events", "emitted"], _RELAY),
}

FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(["clock", "enter_spooled", "spool_identity"], _WORKER),
    **dict.fromkeys(["group_pulse", "queue_stats", "depth_elsewhere", "sink_facts"], "part of a view"),
    **dict.fromkeys(["oldest_waiting", "unsettled", "worker_leases"], "part of a view"),
}

COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(["install", "upgrade", "uninstall", "sql"], "the schema is there before any surface"),
    **dict.fromkeys(["dev", "demo", "console", "mcp", "work", "relay", "janitor"], "runs until it is ended"),
    "doctor": "looks around on the machine that it runs on; HTTP has what the database knows",
    "repro": "writes a test into the current directory",
    "replay watch": "a terminal that looks again and again",
    "sinks list": "another name of `sinks`",
    "sinks show": "one of `sinks`",
    "sinks metrics": "HTTP has /metrics",
    "sinks sync": "reads a file of this machine",
    "sinks test": "sends from where it runs; the console need not reach the bus",
    "tokens list": "another name of `tokens`",
    "workers list": "another name of `workers`",
}

ROUTES: Mapping[str, str] = {
    "GET /health": "for load balancers",
    "GET /openapi.json": "describes the others",
    "HEAD /openapi.json": "likewise",
    "GET /overview": "what several looks say, in one",
    "GET /doctor": "as the command",
    "GET /groups/{}/versions": _GROUP,
    "GET /groups/{}/replays": _GROUP,
}

PAGES: Mapping[str, tuple[str, ...]] = {
    "POST /audit/verify": ("verify_audit",),
    "POST /groups/{group_id}/acknowledge": ("acknowledge_group",),
    "POST /groups/{group_id}/merge": ("merge_groups",),
    "POST /groups/{group_id}/mute": ("mute_group",),
    "POST /groups/{group_id}/reopen": ("reopen_group",),
    "POST /groups/{group_id}/resolve": ("resolve_group",),
    "POST /groups/{group_id}/rules/{rule_id}/remove": ("remove_rule",),
    "POST /groups/{group_id}/split": ("split_group",),
    "POST /letters/confirm": ("count_letters",),
    "POST /letters/deed": ("discard", "restore", "hold", "release held"),
    "POST /letters/{message_id}/discard": ("discard",),
    "POST /letters/{message_id}/edit": ("plan_replay", "start_replay"),
    "POST /letters/{message_id}/hold": ("hold", "release held"),
    "POST /letters/{message_id}/replay": ("replay",),
    "POST /letters/{message_id}/restore": ("restore",),
    "POST /letters/{message_id}/reveal": ("dead_letter",),
    "POST /operations": ("plan_replay",),
    "POST /operations/{replay_id}/again": ("plan_replay",),
    "POST /operations/{replay_id}/plan/approve": ("approve_replay",),
    "POST /operations/{replay_id}/start": ("start_replay",),
    "POST /operations/{replay_id}/{verb}": ("pause_replay", "resume_replay", "cancel_replay"),
    "POST /queues/{name}/pause": ("pause_queue",),
    "POST /queues/{name}/{verb}": ("resume_queue", "force_breaker", "close_breaker"),
    "POST /sinks/{name}/{verb}": ("pause_sink", "resume_sink"),
    "POST /tokens": ("add_token",),
    "POST /tokens/{token_id}/revoke": ("revoke_token",),
    "POST /undo": ("restore",),
    "POST /workers/drain": ("drain_worker",),
    "GET /audit": ("audit_log", "audit_anchor"),
    "GET /groups": ("groups",),
    "GET /groups/{group_id}": ("group", "shared_values", "group_rules"),
    "GET /letters": ("dead_letters", "count_letters"),
    "GET /letters/{message_id}": ("dead_letter", "attempts", "find_message", "explain"),
    "GET /operations": ("replays",),
    "GET /operations/{replay_id}": ("find_replay", "replay_items", "replay_changes"),
    "GET /queues": ("queues",),
    "GET /queues/{name}": ("queues",),
    "GET /sinks": ("sinks",),
    "GET /tokens": ("tokens",),
    "GET /workers": ("workers",),
}
"""Pages of the console, and the verbs of each."""

PARTS_OF_PAGES = {
    "GET /", "GET /doctor", "GET /groups/new", "GET /letters/new", "GET /letters/words", "GET /live",
    "GET /live/history", "GET /login", "GET /metrics", "GET /static/{version}/{name:path}", "POST /login",
    "POST /logout",
}  # fmt: skip

NOT_ON_PAGES: Mapping[str, str] = {
    **dict.fromkeys(["create_queue", "configure_queue", "drop_queue", "attach_pgmq"], "set up with the code"),
    **dict.fromkeys(["put_sink", "remove_sink", "emit_again"], "set up with the code"),
    **dict.fromkeys(["send", "send_many"], "programs send"),
    "erase_key": "rare and irreversible: only at a terminal",
}
