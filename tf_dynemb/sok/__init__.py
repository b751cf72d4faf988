"""For those who come from NVIDIA SOK: functions of its scripts, and its dumps.

May import: `_ops`, `_warn`, `communicator`, `ids`, `optimizers`, `parallel`, `persistence`,
`tables`, `variables`.
"""
