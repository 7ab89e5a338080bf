"""Stamps, waterfalls, spans and metrics. Imports nothing by itself: a client that only wants a traceparent stays light."""
