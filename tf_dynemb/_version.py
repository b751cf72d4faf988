"""Versions. Other files read this one as text, so each is a plain string."""

__version__ = "0.1.0"

# The TensorFlow (major.minor) of the development set-up.
TENSORFLOW_VERSION = "2.21"

# All that operator libraries can be built for, one library for each: C++ interfaces differ.
TENSORFLOW_VERSIONS = ("2.18", "2.19", "2.20", "2.21")
