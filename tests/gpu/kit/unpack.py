"""Unpack wheels whose packages this Python lacks: `unpack.py FOLDER WHEEL …`."""

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def packages(wheel: zipfile.ZipFile) -> set[str]:
    """Names that can be imported from a wheel."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    return {top.removesuffix(".py") for top in tops if not top.endswith((".dist-info", ".libs"))}


for path in sys.argv[2:]:
    with zipfile.ZipFile(path) as wheel:
        if any(find_spec(name) is None for name in packages(wheel)):
            wheel.extractall(sys.argv[1])
            print(f"unpack.py: {Path(path).name}")
