"""``python -m meshwright``: the command line."""

import sys

from meshwright.cli import main

sys.exit(main())
