"""The router: trunk, batching, sampling, and the users' API."""
