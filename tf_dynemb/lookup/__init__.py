"""Lookups of many features in many tables: ids let in, read, pooled, or read a batch ahead.

May import: `_ops`, `communicator`, `ids`, `parallel`, `variables`.
"""
