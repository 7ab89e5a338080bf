"""The version of the software, which every Describe reports."""

VERSION = "0.1.0"
