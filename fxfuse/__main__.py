"""`python -m fxfuse`: the command line (cli/)."""

import sys

from fxfuse.cli import main

sys.exit(main())
