"""Imports a few real modules of an engine's source and stands in for everything else that they name.

`stand_in(root, package, real)`: modules of `package` whose names are in `real` come from `root`; any other of it, and what is not
installed (torch, zmq), is a module whose every name is an empty class. So the definitions that a page shows are the engine's own, and
nothing of it that needs a device is loaded.
"""
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path


class Anything:
    """Takes any arguments, has any method, and does nothing."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __call__(self, *_args, **_kwargs):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __class_getitem__(cls, _item):
        return cls

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (Anything,), {"__module__": self.__name__})
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root, package, real, also):
        self.root, self.package, self.real, self.also = Path(root), package, set(real), set(also)

    def find_spec(self, name, path=None, target=None):
        first = name.split(".")[0]
        if first != self.package and first not in self.also:
            return None
        if name in self.real:
            place = self.root.joinpath(*name.split("."))
            init = place / "__init__.py"
            file = init if init.exists() else place.with_suffix(".py")
            where = [str(place)] if init.exists() else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=where)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def stand_in(root, package, real, also=(), given=None):
    """`given`: {module: {name: value}}, where a stub would not do."""
    sys.meta_path.insert(0, Finder(root, package, real, also))
    for module, names in (given or {}).items():
        imported = importlib.import_module(module)
        for name, value in names.items():
            setattr(imported, name, value)
