"""Putting our functions around another program's, without importing it early and without ever harming it.

`on_import` waits until a module is imported by its own program. `around` replaces one method of one class and says whether it was
there. Whatever is missing is told once in the log; an error of ours never reaches the caller.
"""
import importlib.abc
import inspect
import logging
import sys

# a child of vLLM's own logger: its format, its handlers, and a process that is not vLLM stays quiet
log = logging.getLogger("vllm.truebeat")

_waiting = {}


def on_import(module_name, install):
    """Calls install(module) once the module is there: now, or as soon as its own program has imported it."""
    module = sys.modules.get(module_name)
    if module is not None:
        _guarded(install, module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(module_name, []).append(install)


def around(cls, name, make):
    """Replaces cls.name by make(original), if `cls` itself defines it. Says whether it did."""
    original = vars(cls).get(name)
    if not callable(original) or getattr(original, "truebeat", False):
        return original is not None and callable(original)
    made = make(original)
    made.truebeat = True
    made.__wrapped__ = original
    made.__name__ = name
    made.__doc__ = original.__doc__
    setattr(cls, name, made)
    return True


def of_itself_alone(make):
    """For `around` a method on the way of every step that takes nothing but `self`: a call with open arguments costs three times one without.

    Of a version whose method takes more, the hook gets one that takes them as they come.
    """
    def suited(original):
        if takes(original, "self"):
            return make(original)

        def told(self, *args, **kwargs):
            return make(lambda engine: original(engine, *args, **kwargs))(self)
        return told
    return suited


def takes(function, *names):
    """Does it take these arguments and no others, by place or by name?"""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except Exception:  # noqa: BLE001: of some things nobody can say, and newer Pythons evaluate annotations
        return False
    plain = all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())
    return plain and tuple(parameters) == names


def ours(cls, name):
    """Is what a call of this method on this very class reaches one of ours?"""
    return getattr(getattr(cls, name, None), "truebeat", False)


def missing(what, effect):
    """A hook that this version does not have: told, and lived with."""
    log.warning("truebeat: hook missing: %s (%s)", what, effect)


def never_came(module_name, effect):
    """Tells of a module that `on_import` still waits for, at a time when each version that has it has imported it."""
    if module_name in _waiting:
        missing("module " + module_name, effect)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, and then what waited for it."""

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)

    def create_module(self, spec):
        return self.own.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        for install in _waiting.pop(module.__name__, []):
            _guarded(install, module)


def _guarded(install, module):
    try:
        install(module)
    except Exception as error:  # noqa: BLE001: the program must not notice
        log.warning("truebeat: no hooks in %s: %r", module.__name__, error)
