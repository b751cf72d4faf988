"""The format of snapshots: their manifests, columns and checksums, as docs/file_format.md has them.

numpy only.

May import: nothing.
"""
