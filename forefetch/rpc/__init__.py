"""gRPC as Forefetch uses it: channels, servers, TLS, health, reflection, drain, error mapping.

A client:   with rpc.channel(address, tls) as channel: ... except grpc.RpcError as error: raise rpc.error_of(error) from None
A handler:  @rpc.sync_handler / @rpc.aio_handler above every method of a servicer
A process:  rpc.run_main(PROG, body), whose body does
                server = rpc.serve_sync(config, SERVICE, register, max_workers=16)   # bound; health says NOT_SERVING
                ...load...; rpc.settle()
                server.run()                                                         # SERVING, ready line, until a signal
"""

from forefetch.rpc.channels import MESSAGE_LIMIT, Tls, aio_channel, channel, tls_of
from forefetch.rpc.failures import aio_handler, error_of, status_of, sync_handler, time_left
from forefetch.rpc.health import Pulse, Vitals
from forefetch.rpc.program import announce, loading, run_main, settle, setup_logging
from forefetch.rpc.servers import AioServer, SyncServer, serve_aio, serve_sync

__all__ = [
    "MESSAGE_LIMIT",
    "AioServer",
    "Pulse",
    "SyncServer",
    "Tls",
    "Vitals",
    "aio_channel",
    "aio_handler",
    "announce",
    "channel",
    "error_of",
    "loading",
    "run_main",
    "serve_aio",
    "serve_sync",
    "settle",
    "setup_logging",
    "status_of",
    "sync_handler",
    "time_left",
    "tls_of",
]
