"""Starting ranks: the processes of one machine, their output and their end; for `tf-dynemb run`.

May import: `_presence`.
"""
