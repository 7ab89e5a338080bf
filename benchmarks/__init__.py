"""Measurements, side by side in one run; each prints a table and appends rows to results.csv."""
