from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
