"""Tables as TensorFlow and Keras variables: `DynamicVariable`, `Variable`, and their functions.

May import: `_aliases`, `_ops`, `_version`, `_warn`, `communicator`, `ids`, `parallel`, `tables`.
"""
