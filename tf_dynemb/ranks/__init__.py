"""How processes become ranks: launchers' variables, the rendezvous, engines, and `init`.

May import: `_ops`, `_presence`, `communicator`.
"""
