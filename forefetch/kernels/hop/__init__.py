"""Rows between two GPUs inside recorded steps: written into the other's memory, announced by a signal, awaited with a bound.

`forefetch/p2p/host.py` is the plain form of the same calls. A signal is a u32 counter in its reader's memory: who writes it
has written everything before (release), who sees it sees all that (acquire), both at system scope. Waits end by `patience_ns`
of the device's clock or when `fault` is set, by a host too; whoever sees a fault writes, signals and waits no more.
"""
