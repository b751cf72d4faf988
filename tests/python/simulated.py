"""Whether these tests run with tables of a simulated device, as if on a GPU."""

import os

ENVIRONMENT = "TF_DYNEMB_SIMULATED_DEVICE"
ON = os.environ.get(ENVIRONMENT) == "1"
# What a table may have of the device's memory: few enough that most tests need both tiers.
HBM_BYTES = 4096
