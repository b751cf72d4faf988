"""Versions. Other files read this one as text, so each is a plain string."""

__version__ = "0.1.0"

# The only TensorFlow (major.minor) whose C++ interface the operator library is built for.
TENSORFLOW_VERSION = "2.21"
