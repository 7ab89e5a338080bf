from forefetch.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExpertServiceDescribeRequest(_message.Message):
    __slots__ = ("router", "generation")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    router: str
    generation: int
    def __init__(self, router: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ExpertServiceDescribeResponse(_message.Message):
    __slots__ = ("model_digest", "model", "shard", "shards", "layers", "hidden_size", "dtype", "device", "shm_domain", "instance_id", "max_rows", "version", "expert_format", "generation", "capacity", "row_pairs", "lanes", "moves")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SHM_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ROW_PAIRS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    model: str
    shard: int
    shards: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    hidden_size: int
    dtype: _tensor_pb2.DataType
    device: str
    shm_domain: str
    instance_id: str
    max_rows: int
    version: str
    expert_format: str
    generation: int
    capacity: int
    row_pairs: int
    lanes: str
    moves: bool
    def __init__(self, model_digest: _Optional[str] = ..., model: _Optional[str] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., device: _Optional[str] = ..., shm_domain: _Optional[str] = ..., instance_id: _Optional[str] = ..., max_rows: _Optional[int] = ..., version: _Optional[str] = ..., expert_format: _Optional[str] = ..., generation: _Optional[int] = ..., capacity: _Optional[int] = ..., row_pairs: _Optional[int] = ..., lanes: _Optional[str] = ..., moves: bool = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("epoch", "planner", "experts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    planner: str
    experts: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    def __init__(self, epoch: _Optional[int] = ..., planner: _Optional[str] = ..., experts: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ...) -> None: ...

class PlaceResponse(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: int
    def __init__(self, missing: _Optional[int] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class OpenShmRequest(_message.Message):
    __slots__ = ("segment", "nonce")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    segment: str
    nonce: bytes
    def __init__(self, segment: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class OpenShmResponse(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ("ring", "ring_nonce", "data", "data_nonce", "meeting", "rows", "top_k", "patience_ms", "steps")
    RING_FIELD_NUMBER: _ClassVar[int]
    RING_NONCE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_NONCE_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ring: str
    ring_nonce: bytes
    data: str
    data_nonce: bytes
    meeting: str
    rows: int
    top_k: int
    patience_ms: int
    steps: _containers.RepeatedCompositeFieldContainer[StepShape]
    def __init__(self, ring: _Optional[str] = ..., ring_nonce: _Optional[bytes] = ..., data: _Optional[str] = ..., data_nonce: _Optional[bytes] = ..., meeting: _Optional[str] = ..., rows: _Optional[int] = ..., top_k: _Optional[int] = ..., patience_ms: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepShape, _Mapping]]] = ...) -> None: ...

class StepShape(_message.Message):
    __slots__ = ("rows", "parts")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    parts: int
    def __init__(self, rows: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class OpenLaneResponse(_message.Message):
    __slots__ = ("instance_id", "generation")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    generation: int
    def __init__(self, instance_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("step", "source", "layer", "phase", "experts", "probabilities", "window_ns", "want_residency")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_NS_FIELD_NUMBER: _ClassVar[int]
    WANT_RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    step: int
    source: int
    layer: int
    phase: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    window_ns: int
    want_residency: bool
    def __init__(self, step: _Optional[int] = ..., source: _Optional[int] = ..., layer: _Optional[int] = ..., phase: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., window_ns: _Optional[int] = ..., want_residency: bool = ...) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("step", "layer", "resident")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    step: int
    layer: int
    resident: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., layer: _Optional[int] = ..., resident: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertServiceGetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExpertServiceGetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "calls", "rows", "pairs", "errors", "weight_bytes", "compute_ns", "load", "routers", "hits", "late", "misses", "resident", "wasted_bytes", "copied_bytes", "copy_wait_ns", "hints", "hints_dropped", "copy_ns", "copies_failed", "experts_loaded", "experts_unloaded", "shadowed")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    WASTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    HINTS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    COPY_NS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FAILED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_LOADED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    SHADOWED_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    calls: int
    rows: int
    pairs: int
    errors: int
    weight_bytes: int
    compute_ns: int
    load: _containers.RepeatedCompositeFieldContainer[ExpertLoad]
    routers: int
    hits: int
    late: int
    misses: int
    resident: int
    wasted_bytes: int
    copied_bytes: int
    copy_wait_ns: int
    hints: int
    hints_dropped: int
    copy_ns: int
    copies_failed: int
    experts_loaded: int
    experts_unloaded: int
    shadowed: int
    def __init__(self, uptime_s: _Optional[float] = ..., calls: _Optional[int] = ..., rows: _Optional[int] = ..., pairs: _Optional[int] = ..., errors: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., compute_ns: _Optional[int] = ..., load: _Optional[_Iterable[_Union[ExpertLoad, _Mapping]]] = ..., routers: _Optional[int] = ..., hits: _Optional[int] = ..., late: _Optional[int] = ..., misses: _Optional[int] = ..., resident: _Optional[int] = ..., wasted_bytes: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., copy_wait_ns: _Optional[int] = ..., hints: _Optional[int] = ..., hints_dropped: _Optional[int] = ..., copy_ns: _Optional[int] = ..., copies_failed: _Optional[int] = ..., experts_loaded: _Optional[int] = ..., experts_unloaded: _Optional[int] = ..., shadowed: _Optional[int] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("layer", "experts", "pairs")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    pairs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ..., pairs: _Optional[_Iterable[int]] = ...) -> None: ...
