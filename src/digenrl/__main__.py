"""`python -m digenrl COMMAND`: the same as `digenrl COMMAND`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working directory, which `-m` puts ahead of what is installed
from digenrl.cli.main import main

sys.exit(main())
