"""Tables as TensorFlow and Keras have them: `DynamicVariable`, `Variable`, functions on both.

May import: `_ops`, `communicator`, `ids`, `parallel`, `tables`.
"""
