"""Chains on disk as a whole: their rows, merging, earlier states, copies; numpy only.

May import: `_presence`, `format`, `serving`, `storage`.
"""
