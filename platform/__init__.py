"""The entry point of Archipelago, which also answers for the standard library's `platform` module.

This package has the name of a standard module that torch, Ray and pytest import. Run from the
project's root it is found first, so it runs the standard module's own code in its own namespace:
every name, class and pickle resolves as before. Nothing else happens here (DECISIONS.md, A1).
"""

import importlib.machinery as _machinery
import os as _os  # not pathlib: what is imported here must not need `platform` itself

_standard = _machinery.PathFinder.find_spec("platform", [_os.path.dirname(_os.__file__)])  # noqa: PTH120
exec(_standard.loader.get_code("platform"), globals())
del _machinery, _os, _standard
