"""Serves Mixture-of-Experts language models whose experts do not fit next to their attention layers."""
