"""Chains of snapshots on disk as a whole: their rows, merging, earlier states; numpy only.

May import: `_presence`, `serving`, `storage`.
"""
