"""`python -m server.cli`, which is how the supervisor starts a role."""

import sys

from server.cli import main

sys.exit(main())
