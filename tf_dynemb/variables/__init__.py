"""Tables as TensorFlow and Keras variables: `DynamicVariable`, `Variable`, and their functions.

May import: `_ops`, `communicator`, `ids`, `parallel`, `tables`.
"""
