"""Packages of a GPU machine that libraries import and tests never call: modules whose every name is an empty class."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from transformers.utils.import_utils import is_torchvision_available


class _Empty(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        known = name.partition(".")[0] in self.names
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


def stand_in(*names):
    """Let `import name` succeed where the package is missing."""
    is_torchvision_available()  # transformers asks once: it is to know that there is none
    sys.meta_path.append(_Finder([name for name in names if find_spec(name) is None]))
