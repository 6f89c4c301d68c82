"""The scripts are imported as they are when run: their directory is on the path."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
