"""Hides installed packages from an interpreter that starts with this folder on PYTHONPATH."""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset(os.environ.get("PYTHON_HIDDEN_PACKAGES", "").split())
"""Top-level modules. Child processes inherit the variable."""
MODULES = {
    "kubernetes-validate": "kubernetes_validate",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
}
"""Name of a distribution in lower case -> its module, where the two differ."""


class HidingFinder(PathFinder):
    """Finds what PathFinder finds, without the hidden packages and their metadata."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *arguments, **options):
        for found in PathFinder.find_distributions(*arguments, **options):
            name = found.metadata["Name"].lower()
            if MODULES.get(name, name) not in HIDDEN:
                yield found


sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
