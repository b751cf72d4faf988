"""Whether tests have tables in the memory of a GPU: a real one, or the fake one (tests/fake_gpu).

tests/fake_gpu/modules.txt lists the modules that run a second time so. Tests of the host's table,
its sizes and its threads are not included.
"""

import os

ON = os.environ.get("DYNEMB_TEST_ON_GPU") == "1"
# The GPU memory of a table: so little that most tests use both tiers.
HBM_BYTES = 4096
