"""Every span, attribute and metric that Forefetch emits, by name. Nothing else may spell one.

Names of OpenTelemetry's GenAI semantic conventions are used where there is one. In Prometheus their dots become underscores.
"""

from __future__ import annotations

from typing import NamedTuple

PROVIDER = "forefetch"
CHAT = "chat"
TEXT_COMPLETION = "text_completion"

# Resources (service.name).
SERVICE_ROUTER = "forefetch-router"
SERVICE_EXPERT = "forefetch-expert"
SERVICE_KV = "forefetch-kv"

# Spans.
GENERATE = "forefetch.generate"  # router: a request, from arrival to its last event
QUEUE = "forefetch.queue"  # router: its wait for admission
PREFILL = "forefetch.prefill"  # router: one step that computed prompt tokens of it
DECODE_STEP = "forefetch.decode_step"  # router: one step that computed only its next token
STEP = "forefetch.step"  # router: a step shared by several requests, linked to the span of each
LAYER = "forefetch.layer"  # router: one layer of an outlier step
EXPERT_CALL = "forefetch.expert_call"  # router: one worker's part in a layer, frame sent to reply read
EXPERT_FORWARD = "forefetch.expert_forward"  # worker: the same call as the worker timed it, drawn from its reply
KV_PUT = "forefetch.kv.put"  # router and KV service: sealed blocks on their way
KV_FETCH = "forefetch.kv_fetch"  # router: a cached prefix, from look-up to the last block in its page
KV_LOOK_UP = "forefetch.kv.look_up"
KV_GET = "forefetch.kv.get"

# Attributes of resources.
SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"
SERVICE_VERSION = "service.version"

# Attributes of spans; durations are integers in nanoseconds.
OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
REPLAYED_STEPS = "forefetch.replayed_steps"
STEPS_LOST = "forefetch.steps_lost"
STEP_NUMBER = "forefetch.step.number"
STEP_BATCH = "forefetch.step.batch"
STEP_TOKENS = "forefetch.step.tokens"
STEP_PART = "forefetch.step.{}_ns"  # one for each of PARTS
TOKEN_INDEX = "forefetch.token.index"
PREFILL_TOKENS = "forefetch.prefill.tokens"
LAYER_INDEX = "forefetch.layer.index"
LAYER_PART = "forefetch.layer.{}_ns"  # attention, gate, experts, combine, lookahead, lookahead_hidden
LAYER_COUNT = "forefetch.layer.{}"  # experts chosen, named by hints, found: both
WORKER_ADDRESS = "forefetch.worker"
WORKER_ROWS = "forefetch.worker.rows"
WORKER_PART = "forefetch.worker.{}_ns"  # queue, copy_wait, compute
# Experts needed: hits, late, misses, resident, shadowed; wasted_bytes, copied_bytes, copy_ns.
WORKER_COUNT = "forefetch.worker.{}"

# The disjoint parts of a step (StepTimings.<part>_ns), in the order in which they happen.
PARTS = ("attention", "gate", "lookahead", "link", "queue", "copy_wait", "expert", "combine", "sampling")


class Metric(NamedTuple):
    """A metric of `/metrics`: name, help text, label names. Counters end in _total, durations are in seconds."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type")

# Router: histograms.
REQUEST_DURATION = Metric("gen_ai_server_request_duration_seconds", "Arrival to last event of a request.", _GEN_AI)
TIME_TO_FIRST_TOKEN = Metric("gen_ai_server_time_to_first_token_seconds", "Arrival to first token.", _GEN_AI)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai_server_time_per_output_token_seconds", "Time between a token and the one before it.", _GEN_AI[:3]
)
STEP_DURATION = Metric("forefetch_router_step_duration_seconds", "One engine step.", ("kind",))

# Router: counters and gauges.
REQUESTS = Metric("forefetch_router_requests_total", "Requests that ended, by gRPC status.", ("status",))
RUNNING = Metric("forefetch_router_running", "Requests in the batch.")
WAITING = Metric("forefetch_router_waiting", "Requests in the admission queue.")
PAGES = Metric("forefetch_router_pages", "KV pages in all.")
PAGES_USED = Metric("forefetch_router_pages_used", "KV pages in use.")
PROMPT_TOKENS = Metric("forefetch_router_prompt_tokens_total", "Prompt tokens computed.")
COMPLETION_TOKENS = Metric("forefetch_router_completion_tokens_total", "Tokens generated.")
STEPS = Metric("forefetch_router_steps_total", "Steps run.")
STEPS_REPLAYED = Metric("forefetch_router_replayed_steps_total", "Steps run again after a lost worker.")
P2P_STEPS = Metric("forefetch_router_p2p_steps_total", "Steps that crossed p2p lanes.")
P2P_BREAKS = Metric("forefetch_router_p2p_breaks_total", "Steps that a p2p lane broke off; they were run again.")
STEP_SECONDS = Metric("forefetch_router_step_part_seconds_total", "Time of steps by disjoint part.", ("part",))
WORKER_UP = Metric("forefetch_router_worker_up", "1 while the worker serves.", ("worker",))
WORKER_RECONNECTS = Metric("forefetch_router_worker_reconnects_total", "Times the link was re-established.", ("worker",))
WORKER_PAIRS = Metric("forefetch_router_worker_pairs_total", "(token, expert) pairs sent to a worker.", ("worker",))
WORKER_CALLS = Metric("forefetch_router_worker_calls_total", "Calls sent to a worker.", ("worker",))
WORKER_SECONDS = Metric(
    "forefetch_router_worker_seconds_total",
    "Time of calls by part: round_trip as the router saw it; queue, copy_wait and compute as the worker reports them.",
    ("worker", "part"),
)
HINTS_SENT = Metric("forefetch_router_hints_sent_total", "Hints given to links, one for each worker concerned.")
HINTS_DROPPED = Metric("forefetch_router_hints_dropped_total", "Hints that never left.")
HINT_FAILURES = Metric("forefetch_router_hint_failures_total", "Times that making or delivering a hint failed.")
HINT_EXPERTS = Metric(
    "forefetch_router_hint_experts_total",
    "Distinct experts per step: chosen by the layer, named by hints (all, next, second, refined), found: both.",
    ("layer", "hint", "what"),
)
HINT_RESULTS = Metric(
    "forefetch_router_hint_results_total", "Distinct experts of calls by where workers had them.", ("layer", "result")
)
HINT_BYTES = Metric("forefetch_router_hint_bytes_total", "Bytes that workers copied, and in vain.", ("layer", "what"))
SHADOWED = Metric(
    "forefetch_router_shadowed_experts_total",
    "Experts of steps that were evaluated from copies in fewer bits, an approximation (--miss shadow).",
    ("layer",),
)
HINT_STALL = Metric("forefetch_router_hint_stall_seconds_total", "Time that steps waited for copies.", ("layer",))
KV_UP = Metric("forefetch_router_kv_up", "1 while the KV service answers; absent when none is configured.")
KV_SENT = Metric("forefetch_router_kv_blocks_sent_total", "Sealed blocks handed over.")
KV_DROPPED = Metric("forefetch_router_kv_blocks_dropped_total", "Sealed blocks given up because the queue was full.")
KV_WAITING = Metric("forefetch_router_kv_blocks_waiting", "Sealed blocks waiting to be handed over.")
KV_RECONNECTS = Metric("forefetch_router_kv_reconnects_total", "Times the KV service came back.")
KV_LOADS = Metric("forefetch_router_kv_prefix_loads_total", "Requests for which cached blocks were loaded.")
KV_LOADED = Metric("forefetch_router_kv_blocks_loaded_total", "Cached blocks loaded.")
KV_LOADED_BYTES = Metric("forefetch_router_kv_bytes_loaded_total", "Bytes of cached blocks loaded.")
KV_PREFIX_MISSES = Metric("forefetch_router_kv_prefix_misses_total", "Requests not wholly loaded, by reason.", ("reason",))
KV_SKIPPED = Metric("forefetch_router_kv_prefix_skipped_total", "Prefixes not looked up because computing is faster.")
SESSIONS = Metric("forefetch_router_sessions", "Answers with a session that run, or whose end is on its way to the log.")
SESSION_RECORDS = Metric("forefetch_router_session_records_total", "Records written to logs of sessions.")
SESSION_FAILURES = Metric("forefetch_router_session_failures_total", "Answers whose log stayed incomplete.", ("reason",))

# Expert worker.
EXPERT_CALLS = Metric("forefetch_expert_calls_total", "Layer calls answered.")
EXPERT_ROWS = Metric("forefetch_expert_rows_total", "Rows received.")
EXPERT_PAIRS = Metric("forefetch_expert_pairs_total", "(row, expert) pairs evaluated.")
EXPERT_ERRORS = Metric("forefetch_expert_errors_total", "Frames refused.")
EXPERT_BYTES = Metric("forefetch_expert_weight_bytes", "Bytes of expert weights held.")
EXPERT_COMPUTE = Metric("forefetch_expert_compute_seconds_total", "Time spent computing.")
EXPERT_FOUND = Metric(
    "forefetch_expert_found_total",
    "Distinct experts that calls needed, by where they were: hit (hinted, in fast memory), late, miss, resident.",
    ("found",),
)
EXPERT_SHADOWED = Metric(
    "forefetch_expert_shadowed_total", "Of those late and missed: evaluated from copies in fewer bits, an approximation."
)
EXPERT_COPIED = Metric("forefetch_expert_copied_bytes_total", "Bytes copied into fast memory.")
EXPERT_WASTED = Metric("forefetch_expert_wasted_bytes_total", "Bytes copied for hints that left fast memory unused.")
EXPERT_COPY = Metric("forefetch_expert_copy_seconds_total", "Time that copies took.")
EXPERT_COPY_WAIT = Metric("forefetch_expert_copy_wait_seconds_total", "Time that calls waited for copies.")
EXPERT_COPIES_FAILED = Metric("forefetch_expert_copies_failed_total", "Copies that failed.")
EXPERT_MOVED = Metric("forefetch_expert_moved_total", "Experts loaded and unloaded by command of a planner.", ("what",))
EXPERT_HINTS = Metric("forefetch_expert_hints_total", "Hints taken in.")
EXPERT_HINTS_DROPPED = Metric("forefetch_expert_hints_dropped_total", "Hints that were stale or made no sense.")
EXPERT_ROUTERS = Metric("forefetch_expert_routers", "Routers connected.")
EXPERT_LOAD = Metric("forefetch_expert_load_pairs_total", "Pairs evaluated by each expert.", ("layer", "expert"))

# KV service.
KV_BLOCKS = Metric("forefetch_kv_blocks", "Blocks held.")
KV_BYTES = Metric("forefetch_kv_bytes", "Bytes held.")
KV_BUDGET = Metric("forefetch_kv_budget_bytes", "Most bytes held.")
KV_HITS = Metric("forefetch_kv_hits_total", "Blocks looked up and held.")
KV_MISSES = Metric("forefetch_kv_misses_total", "Blocks looked up and not held.")
KV_STORED = Metric("forefetch_kv_stored_total", "Blocks stored.")
KV_REFUSED = Metric("forefetch_kv_refused_total", "Blocks refused.")
KV_EVICTED = Metric("forefetch_kv_evicted_total", "Blocks evicted to stay under the budget.")
KV_CONFLICTS = Metric("forefetch_kv_conflicts_total", "Attempts to put other bytes under a held key.")
KV_DUPLICATES = Metric("forefetch_kv_duplicates_total", "Puts of bytes that were held already.")
KV_MEMORY = Metric("forefetch_kv_memory_bytes", "Bytes of blocks in memory, those on their way in included.")
KV_DISK_BLOCKS = Metric("forefetch_kv_disk_blocks", "Blocks on disk.")
KV_DISK_READS = Metric("forefetch_kv_disk_reads_total", "Blocks read from disk.")
KV_FAULTS = Metric("forefetch_kv_faults_total", "What went wrong, by the counter's name in GetStats.", ("kind",))
KV_SESSIONS = Metric("forefetch_kv_sessions", "Sessions held.")
KV_SESSION_BYTES = Metric("forefetch_kv_session_bytes", "Bytes of session logs.")
KV_SESSION_RECORDS = Metric("forefetch_kv_session_records_total", "Session records appended.")

# Any process that exports spans.
SPANS_SENT = Metric("forefetch_spans_sent_total", "Spans a collector took.")
SPANS_DROPPED = Metric("forefetch_spans_dropped_total", "Spans given up: queue full, or no collector.")
