"""Halves the time that `import tensorflow` takes in the processes that tests start.

TensorFlow imports Keras, which imports pandas and matplotlib where they are installed: 2.2 of 4.7 s
of the processor's time. No test gives Keras a table of pandas, or has it plot. Others, such as
KServe, still get both.
"""

import sys
from importlib.abc import MetaPathFinder

_OPTIONAL = ("pandas", "matplotlib")


class _NotForKeras(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        """Finds nothing; raises ModuleNotFoundError if Keras imports an optional package."""
        if fullname not in _OPTIONAL:
            return
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("keras."):
                raise ModuleNotFoundError(fullname, name=fullname)
            frame = frame.f_back


sys.meta_path.insert(0, _NotForKeras())
