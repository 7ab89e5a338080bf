"""Generated from protos/forefetch/v1 by scripts/generate_stubs.py; edit the protos instead."""
