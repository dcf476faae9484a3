"""`python -m platform` prints what the standard module prints; the door is `python -m platform.launch`."""

import os
import runpy

runpy.run_path(os.path.join(os.path.dirname(os.__file__), "platform.py"), run_name="__main__")
