"""The KV service: sealed KV blocks that outlive a router."""
