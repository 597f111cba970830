"""`python -m digenrl COMMAND`: the same as `digenrl COMMAND`."""

import sys

from digenrl.cli.main import main

sys.exit(main())
