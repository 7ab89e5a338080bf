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
    __slots__ = ("instance_id", "budget_bytes", "max_block_bytes", "version")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    budget_bytes: int
    max_block_bytes: int
    version: str
    def __init__(self, instance_id: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., max_block_bytes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class BlockKey(_message.Message):
    __slots__ = ("digest", "parent", "token_ids")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parent: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("key", "size", "data", "last", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    size: int
    data: bytes
    last: bool
    checksum: bytes
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ..., last: bool = ..., checksum: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("stored", "refused")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    refused: int
    def __init__(self, stored: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class LookUpRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[BlockKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[BlockKey, _Mapping]]] = ...) -> None: ...

class LookUpResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: int
    def __init__(self, held: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[BlockKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[BlockKey, _Mapping]]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("index", "data", "last", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    last: bool
    checksum: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., last: bool = ..., checksum: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("uptime_s", "blocks", "bytes", "budget_bytes", "hits", "misses", "stored", "refused", "evicted", "conflicts")
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
    def __init__(self, uptime_s: _Optional[float] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., stored: _Optional[int] = ..., refused: _Optional[int] = ..., evicted: _Optional[int] = ..., conflicts: _Optional[int] = ...) -> None: ...
