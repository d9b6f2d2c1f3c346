"""`python -m dynafed`."""

import sys

from dynafed.cli import main

sys.exit(main())
