"""Lookups of many features in many tables: admission, pooling, and prefetching.

May import: `_aliases`, `_ops`, `communicator`, `ids`, `parallel`, `variables`.
"""
