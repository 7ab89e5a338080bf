from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_OUTCOME_UNSPECIFIED: _ClassVar[SessionOutcome]
    SESSION_OUTCOME_APPENDED: _ClassVar[SessionOutcome]
    SESSION_OUTCOME_STALE_EPOCH: _ClassVar[SessionOutcome]
    SESSION_OUTCOME_GAP: _ClassVar[SessionOutcome]
    SESSION_OUTCOME_CONFLICT: _ClassVar[SessionOutcome]
    SESSION_OUTCOME_NO_ROOM: _ClassVar[SessionOutcome]
SESSION_OUTCOME_UNSPECIFIED: SessionOutcome
SESSION_OUTCOME_APPENDED: SessionOutcome
SESSION_OUTCOME_STALE_EPOCH: SessionOutcome
SESSION_OUTCOME_GAP: SessionOutcome
SESSION_OUTCOME_CONFLICT: SessionOutcome
SESSION_OUTCOME_NO_ROOM: SessionOutcome

class KvServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvServiceDescribeResponse(_message.Message):
    __slots__ = ("instance_id", "budget_bytes", "max_block_bytes", "version", "shm_domain")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHM_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    budget_bytes: int
    max_block_bytes: int
    version: str
    shm_domain: str
    def __init__(self, instance_id: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., max_block_bytes: _Optional[int] = ..., version: _Optional[str] = ..., shm_domain: _Optional[str] = ...) -> None: ...

class KvServiceOpenShmRequest(_message.Message):
    __slots__ = ("segment", "nonce", "origin", "pool")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    segment: str
    nonce: bytes
    origin: BlockOrigin
    pool: SharedPool
    def __init__(self, segment: _Optional[str] = ..., nonce: _Optional[bytes] = ..., origin: _Optional[_Union[BlockOrigin, _Mapping]] = ..., pool: _Optional[_Union[SharedPool, _Mapping]] = ...) -> None: ...

class SharedPool(_message.Message):
    __slots__ = ("pid", "file", "nonce", "parts", "stride", "part_bytes", "pages")
    PID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    file: int
    nonce: bytes
    parts: int
    stride: int
    part_bytes: int
    pages: int
    def __init__(self, pid: _Optional[int] = ..., file: _Optional[int] = ..., nonce: _Optional[bytes] = ..., parts: _Optional[int] = ..., stride: _Optional[int] = ..., part_bytes: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class KvServiceOpenShmResponse(_message.Message):
    __slots__ = ("instance_id", "pool")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    pool: bool
    def __init__(self, instance_id: _Optional[str] = ..., pool: bool = ...) -> None: ...

class SharedBlock(_message.Message):
    __slots__ = ("key", "offset", "size", "checksum", "page")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    offset: int
    size: int
    checksum: bytes
    page: int
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., checksum: _Optional[bytes] = ..., page: _Optional[int] = ...) -> None: ...

class SharedPut(_message.Message):
    __slots__ = ("blocks", "traceparent")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[SharedBlock]
    traceparent: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[SharedBlock, _Mapping]]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class BlockKey(_message.Message):
    __slots__ = ("digest", "parent", "token_ids", "position")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parent: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    position: int
    def __init__(self, digest: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ...) -> None: ...

class BlockPart(_message.Message):
    __slots__ = ("key", "size", "index", "data", "last", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    size: int
    index: int
    data: bytes
    last: bool
    checksum: bytes
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., size: _Optional[int] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ..., last: bool = ..., checksum: _Optional[bytes] = ...) -> None: ...

class BlockOrigin(_message.Message):
    __slots__ = ("model_digest", "kv_format", "params", "rope", "layers", "kv_heads", "head_dim", "page_size")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    kv_format: str
    params: str
    rope: str
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    def __init__(self, model_digest: _Optional[str] = ..., kv_format: _Optional[str] = ..., params: _Optional[str] = ..., rope: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("parts", "origin")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[BlockPart]
    origin: BlockOrigin
    def __init__(self, parts: _Optional[_Iterable[_Union[BlockPart, _Mapping]]] = ..., origin: _Optional[_Union[BlockOrigin, _Mapping]] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("stored", "refused")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    refused: int
    def __init__(self, stored: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class LookUpRequest(_message.Message):
    __slots__ = ("last", "digests")
    LAST_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    last: bool
    digests: bytes
    def __init__(self, last: bool = ..., digests: _Optional[bytes] = ...) -> None: ...

class LookUpResponse(_message.Message):
    __slots__ = ("held", "on_disk")
    HELD_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    held: int
    on_disk: int
    def __init__(self, held: _Optional[int] = ..., on_disk: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[BlockKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[BlockKey, _Mapping]]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[BlockPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[BlockPart, _Mapping]]] = ...) -> None: ...

class SessionRecord(_message.Message):
    __slots__ = ("session_id", "epoch", "position", "token_ids", "first_block", "block_digests", "state", "tail", "tail_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    TAIL_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    block_digests: _containers.RepeatedScalarFieldContainer[bytes]
    state: bytes
    tail: bytes
    tail_position: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ..., block_digests: _Optional[_Iterable[bytes]] = ..., state: _Optional[bytes] = ..., tail: _Optional[bytes] = ..., tail_position: _Optional[int] = ...) -> None: ...

class AppendSessionRequest(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[SessionRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[SessionRecord, _Mapping]]] = ...) -> None: ...

class SessionAck(_message.Message):
    __slots__ = ("outcome", "epoch", "tokens", "blocks")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    outcome: SessionOutcome
    epoch: int
    tokens: int
    blocks: int
    def __init__(self, outcome: _Optional[_Union[SessionOutcome, str]] = ..., epoch: _Optional[int] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class AppendSessionResponse(_message.Message):
    __slots__ = ("acks",)
    ACKS_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[SessionAck]
    def __init__(self, acks: _Optional[_Iterable[_Union[SessionAck, _Mapping]]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id", "claim")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    claim: bool
    def __init__(self, session_id: _Optional[str] = ..., claim: bool = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("epoch", "token_ids", "block_digests", "state", "tail", "tail_position")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    TAIL_POSITION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_digests: _containers.RepeatedScalarFieldContainer[bytes]
    state: bytes
    tail: bytes
    tail_position: int
    def __init__(self, epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_digests: _Optional[_Iterable[bytes]] = ..., state: _Optional[bytes] = ..., tail: _Optional[bytes] = ..., tail_position: _Optional[int] = ...) -> None: ...

class KvServiceGetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvServiceGetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "blocks", "bytes", "budget_bytes", "hits", "misses", "stored", "refused", "evicted", "conflicts", "memory_blocks", "memory_bytes", "memory_budget_bytes", "disk_blocks", "disk_reads", "corrupt", "short_reads", "read_errors", "disk_full", "write_errors", "broken", "no_room", "stale_writers", "duplicates", "slow_peers", "damaged_at_start", "unauthenticated", "sessions", "session_bytes", "session_records", "stale_epochs", "sessions_refused", "sessions_dropped", "index_s", "mismatches", "sharers", "shared_blocks")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_READS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    SHORT_READS_FIELD_NUMBER: _ClassVar[int]
    READ_ERRORS_FIELD_NUMBER: _ClassVar[int]
    DISK_FULL_FIELD_NUMBER: _ClassVar[int]
    WRITE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    STALE_WRITERS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    SLOW_PEERS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_AT_START_FIELD_NUMBER: _ClassVar[int]
    UNAUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_RECORDS_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    INDEX_S_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    SHARERS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    blocks: int
    bytes: int
    budget_bytes: int
    hits: int
    misses: int
    stored: int
    refused: int
    evicted: int
    conflicts: int
    memory_blocks: int
    memory_bytes: int
    memory_budget_bytes: int
    disk_blocks: int
    disk_reads: int
    corrupt: int
    short_reads: int
    read_errors: int
    disk_full: int
    write_errors: int
    broken: int
    no_room: int
    stale_writers: int
    duplicates: int
    slow_peers: int
    damaged_at_start: int
    unauthenticated: int
    sessions: int
    session_bytes: int
    session_records: int
    stale_epochs: int
    sessions_refused: int
    sessions_dropped: int
    index_s: float
    mismatches: int
    sharers: int
    shared_blocks: int
    def __init__(self, uptime_s: _Optional[float] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., stored: _Optional[int] = ..., refused: _Optional[int] = ..., evicted: _Optional[int] = ..., conflicts: _Optional[int] = ..., memory_blocks: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_budget_bytes: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., disk_reads: _Optional[int] = ..., corrupt: _Optional[int] = ..., short_reads: _Optional[int] = ..., read_errors: _Optional[int] = ..., disk_full: _Optional[int] = ..., write_errors: _Optional[int] = ..., broken: _Optional[int] = ..., no_room: _Optional[int] = ..., stale_writers: _Optional[int] = ..., duplicates: _Optional[int] = ..., slow_peers: _Optional[int] = ..., damaged_at_start: _Optional[int] = ..., unauthenticated: _Optional[int] = ..., sessions: _Optional[int] = ..., session_bytes: _Optional[int] = ..., session_records: _Optional[int] = ..., stale_epochs: _Optional[int] = ..., sessions_refused: _Optional[int] = ..., sessions_dropped: _Optional[int] = ..., index_s: _Optional[float] = ..., mismatches: _Optional[int] = ..., sharers: _Optional[int] = ..., shared_blocks: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("digest", "limit")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    digest: str
    limit: int
    def __init__(self, digest: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("tenant", "key", "size", "checksum", "in_memory", "on_disk", "children", "origin")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: BlockKey
    size: int
    checksum: bytes
    in_memory: bool
    on_disk: bool
    children: int
    origin: BlockOrigin
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[_Union[BlockKey, _Mapping]] = ..., size: _Optional[int] = ..., checksum: _Optional[bytes] = ..., in_memory: bool = ..., on_disk: bool = ..., children: _Optional[int] = ..., origin: _Optional[_Union[BlockOrigin, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("blocks", "bytes", "damaged", "damaged_digest", "total")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    damaged: int
    damaged_digest: bytes
    total: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., damaged: _Optional[int] = ..., damaged_digest: _Optional[bytes] = ..., total: _Optional[int] = ...) -> None: ...
