"""Packages that SGLang imports whatever it serves and that a text model on a CPU never calls: importing them gives inert modules.

Imported when the environment's Python starts (a .pth file). Code that *asks* whether a package is there (transformers, torch) is told
that it is not: only import statements get the stand-in.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = ("torchvision", "torchaudio", "flashinfer", "timm", "decord", "soundfile", "IPython")


class _Class:
    """What a class of an absent package becomes: it can be derived from, subscripted and made."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _Module(types.ModuleType):
    """Every name in it exists: classes by their capital letter, all else modules that can be called, also as decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Class,), {"__module__": self.__name__}) if name[:1].isupper() else _Module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so a package that is there is found before."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        imported = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"  # else importlib.util.find_spec asks
        if name.split(".")[0] not in ABSENT or not imported:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
