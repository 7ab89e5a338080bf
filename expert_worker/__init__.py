"""The expert worker: a shard of the routed experts behind device slots."""
