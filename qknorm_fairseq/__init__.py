"""Query-Key Normalization (Henry et al. 2020, arXiv 2010.04245) as a fairseq user directory.

Importing this package is cheap: neither torch nor fairseq is loaded, so that `qknorm --help`
answers at once. The fairseq components (`models/`) are registered when fairseq asks for them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

__version__ = "0.1.0"


class _UserDirPath(list[str]):
    """This package's `__path__`, which registers the components when fairseq looks it up.

    fairseq imports `models/` of a `--user-dir` only if it is the first to import the package.
    Of a package that somebody else has imported before, it asks just one thing: whether the
    user directory is in the package's `__path__`. So that is where we say yes, register the
    components, and let a symbolic link to this folder count as this folder.
    """

    def __contains__(self, directory: object) -> bool:
        ours = any(_same_directory(str(directory), path) for path in self)
        if ours and "fairseq" in sys.modules:
            register()
        return ours


def _same_directory(first: str, second: str) -> bool:
    try:
        return Path(first).samefile(second)
    except OSError:
        return False


def register() -> None:
    """Make the architectures known to fairseq, and its checkpoints loadable. Repeatable."""
    importlib.import_module("qknorm_fairseq.models.transformer_qknorm")


__path__ = _UserDirPath(__path__)
