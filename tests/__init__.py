"""The tests; `YOPO_TEST_SEED` gives all that they draw another base seed."""

import os

SEED = int(os.environ.get("YOPO_TEST_SEED", "0"))
