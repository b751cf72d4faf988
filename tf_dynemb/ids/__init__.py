"""Ids as a user passes them: `keys` of a table's type, and the `bags` that they come in.

May import: `_ops`.
"""
