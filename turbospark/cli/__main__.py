"""`python -m turbospark.cli`."""

import sys

from turbospark.cli.main import main

sys.exit(main())
