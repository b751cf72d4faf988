"""What is on disk as a whole: rows of chains, merging, earlier states, copies; numpy only.

May import: `_presence`, `serving`, `storage`.
"""
