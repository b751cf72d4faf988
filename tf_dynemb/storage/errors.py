"""What is raised where a file on disk is not what was written."""

from __future__ import annotations


class DataLossError(ValueError):
    """A file is missing, damaged or of another snapshot; the message names it.

    Where it is known, the message also says at which byte offset of the file.
    """
