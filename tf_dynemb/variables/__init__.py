"""Tables as TensorFlow and Keras variables: `DynamicVariable`, `Variable`, and their functions.

May import: `_aliases`, `_ops`, `communicator`, `ids`, `parallel`, `tables`.
"""
