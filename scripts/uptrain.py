"""`kvjax uptrain`: python scripts/uptrain.py SRC DST --data FILE --steps N"""

import sys

from kvjax.cli import app

app(["uptrain", *sys.argv[1:]])
