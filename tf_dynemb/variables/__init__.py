"""Tables as variables of TensorFlow and Keras: `DynamicVariable`, `Variable`, and access to both.

May import: `_ops`, `communicator`, `ids`, `parallel`, `tables`.
"""
