from forefetch.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_MODE_UNSPECIFIED: _ClassVar[SessionMode]
    SESSION_MODE_START: _ClassVar[SessionMode]
    SESSION_MODE_CONTINUE: _ClassVar[SessionMode]
    SESSION_MODE_RESUME: _ClassVar[SessionMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT: _ClassVar[FinishReason]
SESSION_MODE_UNSPECIFIED: SessionMode
SESSION_MODE_START: SessionMode
SESSION_MODE_CONTINUE: SessionMode
SESSION_MODE_RESUME: SessionMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CONTEXT: FinishReason

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("max_tokens", "strings", "token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ...) -> None: ...

class SessionParams(_message.Message):
    __slots__ = ("id", "mode", "next_index", "answer")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    id: str
    mode: SessionMode
    next_index: int
    answer: str
    def __init__(self, id: _Optional[str] = ..., mode: _Optional[_Union[SessionMode, str]] = ..., next_index: _Optional[int] = ..., answer: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "tokens", "chat", "sampling", "stop", "top_logprobs", "request_id", "session")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: TokenPrompt
    chat: ChatPrompt
    sampling: SamplingParams
    stop: StopParams
    top_logprobs: int
    request_id: str
    session: SessionParams
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopParams, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., request_id: _Optional[str] = ..., session: _Optional[_Union[SessionParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token", "finish")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    token: TokenEvent
    finish: FinishEvent
    def __init__(self, token: _Optional[_Union[TokenEvent, _Mapping]] = ..., finish: _Optional[_Union[FinishEvent, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("index", "token_id", "text", "logprob", "top_logprobs", "timings")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    text: str
    logprob: TokenLogprob
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    timings: StepTimings
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("total_ns", "attention_ns", "gate_ns", "link_ns", "expert_ns", "copy_wait_ns", "queue_ns", "combine_ns", "sampling_ns", "batch", "tokens", "lookahead_ns", "lookahead_hidden_ns", "shadow_experts")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_NS_FIELD_NUMBER: _ClassVar[int]
    GATE_NS_FIELD_NUMBER: _ClassVar[int]
    LINK_NS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    COMBINE_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_NS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_HIDDEN_NS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    attention_ns: int
    gate_ns: int
    link_ns: int
    expert_ns: int
    copy_wait_ns: int
    queue_ns: int
    combine_ns: int
    sampling_ns: int
    batch: int
    tokens: int
    lookahead_ns: int
    lookahead_hidden_ns: int
    shadow_experts: int
    def __init__(self, total_ns: _Optional[int] = ..., attention_ns: _Optional[int] = ..., gate_ns: _Optional[int] = ..., link_ns: _Optional[int] = ..., expert_ns: _Optional[int] = ..., copy_wait_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., combine_ns: _Optional[int] = ..., sampling_ns: _Optional[int] = ..., batch: _Optional[int] = ..., tokens: _Optional[int] = ..., lookahead_ns: _Optional[int] = ..., lookahead_hidden_ns: _Optional[int] = ..., shadow_experts: _Optional[int] = ...) -> None: ...

class FinishEvent(_message.Message):
    __slots__ = ("reason", "text", "usage", "ttft_ns", "duration_ns", "request_id", "seed", "approximations", "stop_string", "session")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATIONS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    text: str
    usage: Usage
    ttft_ns: int
    duration_ns: int
    request_id: str
    seed: int
    approximations: Approximations
    stop_string: str
    session: SessionStatus
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., ttft_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ..., approximations: _Optional[_Union[Approximations, _Mapping]] = ..., stop_string: _Optional[str] = ..., session: _Optional[_Union[SessionStatus, _Mapping]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("id", "tokens", "saved", "resumed_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tokens: int
    saved: bool
    resumed_tokens: int
    def __init__(self, id: _Optional[str] = ..., tokens: _Optional[int] = ..., saved: bool = ..., resumed_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "replayed_steps")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_STEPS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    replayed_steps: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., replayed_steps: _Optional[int] = ...) -> None: ...

class Approximations(_message.Message):
    __slots__ = ("kv_format", "shadow_experts", "expert_format", "shadow_format", "trunk_format")
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TRUNK_FORMAT_FIELD_NUMBER: _ClassVar[int]
    kv_format: str
    shadow_experts: int
    expert_format: str
    shadow_format: str
    trunk_format: str
    def __init__(self, kv_format: _Optional[str] = ..., shadow_experts: _Optional[int] = ..., expert_format: _Optional[str] = ..., shadow_format: _Optional[str] = ..., trunk_format: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatPrompt
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model", "model_digest", "family", "context_length", "vocab_size", "default_max_tokens", "max_waiting", "max_batch", "kv_format", "kv_parameters", "page_size", "device", "dtype", "workers", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    family: str
    context_length: int
    vocab_size: int
    default_max_tokens: int
    max_waiting: int
    max_batch: int
    kv_format: str
    kv_parameters: str
    page_size: int
    device: str
    dtype: _tensor_pb2.DataType
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    version: str
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., family: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., default_max_tokens: _Optional[int] = ..., max_waiting: _Optional[int] = ..., max_batch: _Optional[int] = ..., kv_format: _Optional[str] = ..., kv_parameters: _Optional[str] = ..., page_size: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("address", "link", "up", "experts", "shard", "shards", "reconnects", "pairs", "calls")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    address: str
    link: str
    up: bool
    experts: int
    shard: int
    shards: int
    reconnects: int
    pairs: int
    calls: int
    def __init__(self, address: _Optional[str] = ..., link: _Optional[str] = ..., up: bool = ..., experts: _Optional[int] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., reconnects: _Optional[int] = ..., pairs: _Optional[int] = ..., calls: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("p50_ns", "p99_ns", "count")
    P50_NS_FIELD_NUMBER: _ClassVar[int]
    P99_NS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    p50_ns: int
    p99_ns: int
    count: int
    def __init__(self, p50_ns: _Optional[int] = ..., p99_ns: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "requests_ok", "requests_failed", "running", "waiting", "prompt_tokens", "completion_tokens", "steps", "replayed_steps", "pages_total", "pages_used", "ttft", "tpot", "step", "workers", "kv", "mean_step", "hints", "expert_load", "p2p_steps", "p2p_breaks")
    class RequestsFailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_OK_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MEAN_STEP_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOAD_FIELD_NUMBER: _ClassVar[int]
    P2P_STEPS_FIELD_NUMBER: _ClassVar[int]
    P2P_BREAKS_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    requests_ok: int
    requests_failed: _containers.ScalarMap[str, int]
    running: int
    waiting: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    replayed_steps: int
    pages_total: int
    pages_used: int
    ttft: Quantiles
    tpot: Quantiles
    step: Quantiles
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    kv: KvStatus
    mean_step: StepTimings
    hints: HintStats
    expert_load: _containers.RepeatedCompositeFieldContainer[LayerLoad]
    p2p_steps: int
    p2p_breaks: int
    def __init__(self, uptime_s: _Optional[float] = ..., requests_ok: _Optional[int] = ..., requests_failed: _Optional[_Mapping[str, int]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., replayed_steps: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_used: _Optional[int] = ..., ttft: _Optional[_Union[Quantiles, _Mapping]] = ..., tpot: _Optional[_Union[Quantiles, _Mapping]] = ..., step: _Optional[_Union[Quantiles, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., kv: _Optional[_Union[KvStatus, _Mapping]] = ..., mean_step: _Optional[_Union[StepTimings, _Mapping]] = ..., hints: _Optional[_Union[HintStats, _Mapping]] = ..., expert_load: _Optional[_Iterable[_Union[LayerLoad, _Mapping]]] = ..., p2p_steps: _Optional[int] = ..., p2p_breaks: _Optional[int] = ...) -> None: ...

class HintStats(_message.Message):
    __slots__ = ("mode", "setting", "trained", "sent", "dropped", "failures", "layers")
    MODE_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    setting: str
    trained: bool
    sent: int
    dropped: int
    failures: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerHints]
    def __init__(self, mode: _Optional[str] = ..., setting: _Optional[str] = ..., trained: bool = ..., sent: _Optional[int] = ..., dropped: _Optional[int] = ..., failures: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerHints, _Mapping]]] = ...) -> None: ...

class HintCount(_message.Message):
    __slots__ = ("named", "found")
    NAMED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    named: int
    found: int
    def __init__(self, named: _Optional[int] = ..., found: _Optional[int] = ...) -> None: ...

class LayerHints(_message.Message):
    __slots__ = ("layer", "chosen", "all", "next", "second", "refined", "hits", "late", "misses", "resident", "wasted_bytes", "copied_bytes", "stall_ns", "copy_ns", "shadowed")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    REFINED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    WASTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALL_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_NS_FIELD_NUMBER: _ClassVar[int]
    SHADOWED_FIELD_NUMBER: _ClassVar[int]
    layer: int
    chosen: int
    all: HintCount
    next: HintCount
    second: HintCount
    refined: HintCount
    hits: int
    late: int
    misses: int
    resident: int
    wasted_bytes: int
    copied_bytes: int
    stall_ns: int
    copy_ns: int
    shadowed: int
    def __init__(self, layer: _Optional[int] = ..., chosen: _Optional[int] = ..., all: _Optional[_Union[HintCount, _Mapping]] = ..., next: _Optional[_Union[HintCount, _Mapping]] = ..., second: _Optional[_Union[HintCount, _Mapping]] = ..., refined: _Optional[_Union[HintCount, _Mapping]] = ..., hits: _Optional[int] = ..., late: _Optional[int] = ..., misses: _Optional[int] = ..., resident: _Optional[int] = ..., wasted_bytes: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., stall_ns: _Optional[int] = ..., copy_ns: _Optional[int] = ..., shadowed: _Optional[int] = ...) -> None: ...

class LayerLoad(_message.Message):
    __slots__ = ("layer", "pairs")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    pairs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., pairs: _Optional[_Iterable[int]] = ...) -> None: ...

class KvStatus(_message.Message):
    __slots__ = ("address", "up", "blocks_sent", "blocks_dropped", "blocks_waiting", "reconnects", "replicas", "prefix_loads", "blocks_loaded", "bytes_loaded", "prefix_misses", "prefix_skipped", "sessions", "session_records", "session_failures", "rows_sent", "rows_dropped", "rows_loaded")
    class PrefixMissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SessionFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WAITING_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOADS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOADED_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MISSES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_RECORDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FAILURES_FIELD_NUMBER: _ClassVar[int]
    ROWS_SENT_FIELD_NUMBER: _ClassVar[int]
    ROWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    ROWS_LOADED_FIELD_NUMBER: _ClassVar[int]
    address: str
    up: bool
    blocks_sent: int
    blocks_dropped: int
    blocks_waiting: int
    reconnects: int
    replicas: _containers.RepeatedCompositeFieldContainer[KvReplica]
    prefix_loads: int
    blocks_loaded: int
    bytes_loaded: int
    prefix_misses: _containers.ScalarMap[str, int]
    prefix_skipped: int
    sessions: int
    session_records: int
    session_failures: _containers.ScalarMap[str, int]
    rows_sent: int
    rows_dropped: int
    rows_loaded: int
    def __init__(self, address: _Optional[str] = ..., up: bool = ..., blocks_sent: _Optional[int] = ..., blocks_dropped: _Optional[int] = ..., blocks_waiting: _Optional[int] = ..., reconnects: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[KvReplica, _Mapping]]] = ..., prefix_loads: _Optional[int] = ..., blocks_loaded: _Optional[int] = ..., bytes_loaded: _Optional[int] = ..., prefix_misses: _Optional[_Mapping[str, int]] = ..., prefix_skipped: _Optional[int] = ..., sessions: _Optional[int] = ..., session_records: _Optional[int] = ..., session_failures: _Optional[_Mapping[str, int]] = ..., rows_sent: _Optional[int] = ..., rows_dropped: _Optional[int] = ..., rows_loaded: _Optional[int] = ...) -> None: ...

class KvReplica(_message.Message):
    __slots__ = ("address", "up", "blocks_sent", "blocks_dropped", "blocks_waiting", "reconnects")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WAITING_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    up: bool
    blocks_sent: int
    blocks_dropped: int
    blocks_waiting: int
    reconnects: int
    def __init__(self, address: _Optional[str] = ..., up: bool = ..., blocks_sent: _Optional[int] = ..., blocks_dropped: _Optional[int] = ..., blocks_waiting: _Optional[int] = ..., reconnects: _Optional[int] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("request_id", "trace_id", "arrival_unix_ns", "queued_ns", "steps", "workers", "steps_lost", "load_ns", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    arrival_unix_ns: int
    queued_ns: int
    steps: _containers.RepeatedCompositeFieldContainer[StepTrace]
    workers: _containers.RepeatedScalarFieldContainer[str]
    steps_lost: int
    load_ns: int
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., arrival_unix_ns: _Optional[int] = ..., queued_ns: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepTrace, _Mapping]]] = ..., workers: _Optional[_Iterable[str]] = ..., steps_lost: _Optional[int] = ..., load_ns: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("step", "start_ns", "timings", "token_index", "prefill_tokens", "layers")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    start_ns: int
    timings: StepTimings
    token_index: int
    prefill_tokens: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerTrace]
    def __init__(self, step: _Optional[int] = ..., start_ns: _Optional[int] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., token_index: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerTrace, _Mapping]]] = ...) -> None: ...

class LayerTrace(_message.Message):
    __slots__ = ("layer", "start_ns", "attention_ns", "gate_ns", "experts_ns", "combine_ns", "calls", "lookahead_ns", "lookahead_hidden_ns", "chosen", "named", "found")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_NS_FIELD_NUMBER: _ClassVar[int]
    GATE_NS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_NS_FIELD_NUMBER: _ClassVar[int]
    COMBINE_NS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_NS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_HIDDEN_NS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    layer: int
    start_ns: int
    attention_ns: int
    gate_ns: int
    experts_ns: int
    combine_ns: int
    calls: _containers.RepeatedCompositeFieldContainer[WorkerCall]
    lookahead_ns: int
    lookahead_hidden_ns: int
    chosen: int
    named: int
    found: int
    def __init__(self, layer: _Optional[int] = ..., start_ns: _Optional[int] = ..., attention_ns: _Optional[int] = ..., gate_ns: _Optional[int] = ..., experts_ns: _Optional[int] = ..., combine_ns: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[WorkerCall, _Mapping]]] = ..., lookahead_ns: _Optional[int] = ..., lookahead_hidden_ns: _Optional[int] = ..., chosen: _Optional[int] = ..., named: _Optional[int] = ..., found: _Optional[int] = ...) -> None: ...

class WorkerCall(_message.Message):
    __slots__ = ("worker", "rows", "round_trip_ns", "queue_ns", "copy_wait_ns", "compute_ns", "hits", "late", "misses", "copied_bytes", "copy_ns", "shadowed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_NS_FIELD_NUMBER: _ClassVar[int]
    SHADOWED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    rows: int
    round_trip_ns: int
    queue_ns: int
    copy_wait_ns: int
    compute_ns: int
    hits: int
    late: int
    misses: int
    copied_bytes: int
    copy_ns: int
    shadowed: int
    def __init__(self, worker: _Optional[int] = ..., rows: _Optional[int] = ..., round_trip_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., copy_wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., hits: _Optional[int] = ..., late: _Optional[int] = ..., misses: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., copy_ns: _Optional[int] = ..., shadowed: _Optional[int] = ...) -> None: ...
