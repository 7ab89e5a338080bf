"""How the service is added to a gRPC server: its blocks travel as Messages, which copy nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import grpc

from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.block_messages import Message

if TYPE_CHECKING:
    from kv_service.server import KvServicer


def add_to(server: grpc.Server, servicer: KvServicer) -> None:
    """Adds the service, whose Put takes and whose Get gives Messages."""
    pb_grpc.add_KvServiceServicer_to_server(servicer, cast("grpc.Server", _Adding(server)))


class _Adding:
    """Where generated code adds its methods."""

    def __init__(self, server: grpc.Server) -> None:
        self._server: Any = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same methods come again, by name."""

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        """By name."""
        methods["Put"] = methods["Put"]._replace(request_deserializer=Message.decode)
        methods["Get"] = methods["Get"]._replace(response_serializer=Message.encode)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        self._server.add_registered_method_handlers(service, methods)
