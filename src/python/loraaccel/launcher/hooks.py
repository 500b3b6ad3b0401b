"""Looks at modules when they are imported, and patches what LoRA modules their classes make. Nothing is imported here
that the script does not import itself, torch included."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

# Called with an object whose LoRA modules have just come to life: a module of kohya's kind, or a model with adapters.
Created = Callable[[Any], None]
# Called with a network of such modules that has just been applied to its model.
Applied = Callable[[Any], None]
# Called with the name of a Python module that has run.
Imported = Callable[[str], None]


class ImportHook(importlib.abc.MetaPathFinder):
    """Stands before the other finders, asks them, and looks at each Python module once it has run."""

    def __init__(self, created: Created, applied: Applied, imported: Imported) -> None:
        self.created = created
        self.applied = applied
        self.imported = imported
        self._asked = threading.local()  # names that this thread is looking for

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        asked: set[str] = self._asked.__dict__.setdefault("names", set())
        if name in asked:  # another hook of this kind asks us in turn
            return None
        asked.add(name)
        try:
            for finder in sys.meta_path:
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is None:
                    continue
                if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    self._watch(spec.loader)
                return spec
            return None
        finally:
            asked.discard(name)

    def _watch(self, loader: Any) -> None:
        original = loader.exec_module

        @functools.wraps(original)
        def exec_module(module: ModuleType) -> None:
            original(module)
            watch_module(module, self.created, self.applied)
            self.imported(module.__name__)

        loader.exec_module = exec_module  # of this module's loader only


def watch_module(module: ModuleType, created: Created, applied: Applied) -> None:
    """Wraps what makes LoRA modules: `apply_to` of classes that replace a layer's forward, PEFT's `inject_adapter`; and
    `apply_to` of networks, modules that have no forward of their own."""
    if "torch" not in sys.modules:
        return
    for cls in _classes(module):
        if "apply_to" in cls.__dict__:
            if "forward" in cls.__dict__:
                _after(cls, "apply_to", created)
            elif _is_network(cls):
                _after(cls, "apply_to", applied)
    if module.__name__ == "peft.tuners.tuners_utils":
        _after(module.BaseTuner, "inject_adapter", lambda self: created(self.model))


def _is_network(cls: Any) -> bool:
    nn = sys.modules.get("torch.nn")
    return nn is not None and issubclass(cls, nn.Module) and cls.forward is nn.Module.forward


def _classes(module: ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        # (Not isinstance, which asks the object: some answer with a warning that they are deprecated.)
        if issubclass(type(value), type) and value.__module__ == module.__name__:
            yield value


def _after(cls: Any, name: str, call: Callable[[Any], None]) -> None:
    original = cls.__dict__[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call(self)
        return result

    setattr(cls, name, method)
