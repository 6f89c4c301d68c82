"""`kvjax bench`: python scripts/bench_decode.py --kv-heads 32,8,1 --length 8192"""

import sys

from kvjax.cli import app

app(["bench", *sys.argv[1:]])
