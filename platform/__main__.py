"""`python -m platform` prints what the standard module prints; the entry point is `python -m platform.launch`."""

import os
import runpy
from pathlib import Path

runpy.run_path(str(Path(os.__file__).with_name("platform.py")), run_name="__main__")
