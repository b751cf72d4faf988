"""`python -m tf_dynemb`: commands on dumps."""

import sys

from tf_dynemb.cli import main

if __name__ == "__main__":
    sys.exit(main())
