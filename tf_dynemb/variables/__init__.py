"""Tables as variables of TensorFlow and Keras: `DynamicVariable`, `Variable`, and both by name.

May import: `_ops`, `communicator`, `ids`, `parallel`, `tables`.
"""
