"""`kvjax convert`: python scripts/convert_mha_to_gqa.py SRC DST --kv-heads K"""

import sys

from kvjax.cli import app

app(["convert", *sys.argv[1:]])
