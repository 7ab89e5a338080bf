"""Memory and signals that a router and a worker of one node share, so that a layer's rows cross without the hosts.

A *lane* joins one router and one worker. Each side owns the memory that it reads and the other writes: the worker an inbox
(rows, expert ids, gate weights), the router an outbox (results), each with a signal word that counts calls. `lane` is its
layout, `ring` how steps are agreed on, `host` a lane in shared memory, `device` one in the memory of two GPUs.
"""
