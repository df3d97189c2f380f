"""The user's main script in processes that did not run it: loaded there when something they are given is defined in it.

Ranks and the plain process of `verify` are started afresh. A class of the main script is pickled as `__main__.Name`,
which means nothing to them; so they load the script's file under another name, as multiprocessing does. What the script
does under `if __name__ == "__main__":` is not done again, and a script that trains outside of it is refused.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from phalanx.errors import ConfigError, PhalanxError

_LOADED_AS = "__mp_main__"
_LOADING = "_inheriting"  # by this attribute multiprocessing, too, knows a process that loads the main script


@dataclass(frozen=True)
class MainScript:
    """Where `__main__` comes from: a file, a module that was started with -m, or neither (a notebook)."""

    path: str | None
    module: str | None
    arguments: tuple[str, ...]

    @classmethod
    def of_this_process(cls) -> MainScript:
        main = sys.modules["__main__"]
        path = getattr(main, "__file__", None)
        module = getattr(getattr(main, "__spec__", None), "name", None)
        return cls(
            None if path is None else os.path.abspath(path),
            None if module == "__main__" else module,  # what a folder or an archive is started as has no other name
            tuple(sys.argv),
        )

    @property
    def name(self) -> str:
        return self.module or os.path.basename(self.path or "the main script")


@contextlib.contextmanager
def explained_pickling() -> Iterator[None]:
    """Around pickling what other processes are given."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"what the run is given cannot be handed to other processes: {error}",
            "define classes and functions at the top level of a module, or train on one rank (ranks=1)",
        ) from error


def unpickle(file: IO[bytes], main: MainScript) -> Any:
    """What a process whose main script is `main` has pickled."""
    try:
        return _Unpickler(file, main).load()
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a process that was started afresh cannot find something it was given: {error}",
            "put classes and functions that other processes need at the top level of a module that can be imported",
        ) from error


def refuse_while_loading(call: str) -> None:
    """Whoever loads the main script to find something in it must not do what the script is there for."""
    if getattr(multiprocessing.current_process(), _LOADING, False):
        script = getattr(sys.modules.get(_LOADED_AS), "__file__", "the main script")
        raise ConfigError(
            f"{os.path.basename(script)} calls {call} whenever it is loaded, and other processes must load it to find "
            "what is defined there",
            'put the call under `if __name__ == "__main__":`',
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], main: MainScript) -> None:
        super().__init__(file)
        self._main = main

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name not in ("__main__", _LOADED_AS):
            return super().find_class(module_name, global_name)
        _load(self._main, global_name)
        try:
            return super().find_class("__main__", global_name)
        except AttributeError:
            raise ConfigError(
                f"a process that loads {self._main.name} afresh does not find '{global_name}' in it",
                'define it at the top level, outside of functions and of `if __name__ == "__main__":`, '
                "or in a module that is imported there",
            ) from None


def _load(main: MainScript, wanted: str) -> None:
    """Makes the main script this process's `__main__`, if it is not already."""
    if _is_loaded(main):
        return
    if main.path is None and main.module is None:
        raise ConfigError(
            f"'{wanted}' is defined in a notebook or an interactive session, where other processes cannot find it",
            "put it into a file of its own and import it from there",
        )
    module = types.ModuleType(_LOADED_AS)
    vars(module).update(_contents(main))
    sys.modules["__main__"] = sys.modules[_LOADED_AS] = module


def _is_loaded(main: MainScript) -> bool:
    here = MainScript.of_this_process()
    return here.module == main.module if main.module is not None else here.path == main.path is not None


def _contents(main: MainScript) -> dict[str, Any]:
    sys.argv[:] = main.arguments
    try:
        with _loading():
            if main.module is not None:
                return runpy.run_module(main.module, run_name=_LOADED_AS, alter_sys=True)
            assert main.path is not None
            return runpy.run_path(main.path, run_name=_LOADED_AS)
    except PhalanxError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{main.name} cannot be loaded by another process: {type(error).__name__}: {error}",
            'only definitions should stand outside of `if __name__ == "__main__":`',
        ) from error


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    process = multiprocessing.current_process()
    setattr(process, _LOADING, True)
    try:
        yield
    finally:
        delattr(process, _LOADING)
