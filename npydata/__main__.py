"""``python -m npydata`` is the ``npydata`` command."""

import sys

from npydata.cli import main

if __name__ == "__main__":
    sys.exit(main())
