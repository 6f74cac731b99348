"""vLLM plugin: octopage in place of vLLM's module of sparse prefill pages.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`, name `octopage`). The environment
says what it does:

    OCTOPAGE_VLLM         off (default), on, or verify: the engine's functions and octopage's both run and are
                          compared; the engine's results are used, a difference raises VerificationError
    OCTOPAGE_VLLM_MODULE  full names of modules to replace, separated by commas; default: every module below `vllm`
                          that is called `sparse_prefill_pages`

A module is replaced as a whole, and only where its names, signatures and fields are those that octopage expects (vLLM
0.34's); otherwise it is left alone and the reason is logged. It makes no difference whether the module is imported
before `register` or after it. Nothing here imports vllm or torch.
"""

import importlib
import importlib.abc
import logging
import os
import sys
import threading
import types

from ._engine_adapter import adapted
from ._engine_match import PLAN, differences
from ._engine_verify import VerificationError, Verifier

__all__ = ["VerificationError", "disable", "register", "status"]

MODES = ("off", "on", "verify")
MODULE_NAME = "sparse_prefill_pages"

# A child of vLLM's own logger: it shows where vLLM's messages show.
_logger = logging.getLogger("vllm.octopage")
_lock = threading.RLock()  # never held while a module is imported
_logged = set()
_mode = "off"
_finder = None
_replaced = {}  # module name -> [_Replacement]; a module that is loaded again gets another one


def register() -> None:
    """Does what OCTOPAGE_VLLM says. May be called any number of times, from any thread."""
    global _mode, _finder
    mode = _mode_of_environment()
    with _lock:
        if mode != _mode:
            disable()
        _mode = mode
        if mode == "off":
            return
        if _finder is None:
            _finder = _Finder()
            sys.meta_path.insert(0, _finder)
    for name in [name for name, module in list(sys.modules.items()) if module is not None and _wanted(name)]:
        try:
            module = importlib.import_module(name)  # it is there: this waits where another thread still runs its code
        except Exception:  # that code failed, which is told where it was imported
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            _log(logging.WARNING, f"initializing {name}",
                 f"{name} is being imported right now and is left alone; call octopage.vllm_plugin.register() again")
        else:
            _replace(module)


def disable() -> None:
    """Puts everything back that `register` replaced, wherever it still stands."""
    global _mode, _finder
    with _lock:
        if _finder is not None and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        _finder, _mode = None, "off"
        for replacements in _replaced.values():
            for replacement in reversed(replacements):
                replacement.undo()
        _replaced.clear()
        _logged.clear()


def status() -> dict:
    """{"mode": ..., "replaced": [module names], "compared": {function: calls}}."""
    with _lock:
        compared = {}
        for replacement in [one for replacements in _replaced.values() for one in replacements]:
            for name, calls in replacement.compared().items():
                compared[name] = compared.get(name, 0) + calls
        return {"mode": _mode, "replaced": sorted(_replaced), "compared": compared}


def _mode_of_environment():
    value = os.environ.get("OCTOPAGE_VLLM", "").strip().lower() or "off"
    if value in MODES:
        return value
    _log(logging.WARNING, f"mode {value}",
         f"OCTOPAGE_VLLM = {value!r}: must be one of {', '.join(MODES)}; the plugin is off")
    return "off"


def _wanted(name):
    named = os.environ.get("OCTOPAGE_VLLM_MODULE", "").strip()
    if named:
        return name in [part.strip() for part in named.split(",")]
    return name.startswith("vllm.") and name.endswith("." + MODULE_NAME)


def _log(level, key, text):
    with _lock:
        if key in _logged:
            return
        _logged.add(key)
    _logger.log(level, "octopage: %s", text)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and replaces it once its code has run."""

    def find_spec(self, name, path=None, target=None):
        if not _wanted(name):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """The loader that it is made of, but for what follows the module's code."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # as if we had not been here
        self._loader.exec_module(module)
        _replace(module)


def _replace(module):
    """Never raises: an engine must start whatever its module looks like."""
    name = module.__name__
    try:
        with _lock:
            if _mode == "off" or any(known.stands(module) for known in _replaced.get(name, ())):
                return
            found = differences(module)
            if not found and _mode == "verify" and getattr(module, PLAN).__dictoffset__ == 0:
                found = [f"{PLAN} has __slots__, verify needs a __dict__"]
            if found:
                _log(logging.WARNING, f"left {name}", f"{name} is left alone: {'; '.join(found)}")
                return
            replacement = _Replacement(module, _mode)
            _replaced.setdefault(name, []).append(replacement)
            replacement.do()
            _log(logging.INFO, f"replaced {name}", {
                "on": f"{name} is replaced by octopage",
                "verify": f"every call of {name} is compared with octopage"}[_mode])
    except Exception:
        _logger.exception("octopage: %s is left alone", name)


class _Replacement:
    """What stands for the names of one module, in that module and wherever else its objects are bound."""

    def __init__(self, module, mode):
        self._module, self._undo = module, []
        names = vars(module)
        self._verifier = self._plan = None
        if mode == "verify":
            self._verifier = Verifier(module, lambda text, key: _log(logging.WARNING, f"{module.__name__} {key}", text),
                                      lambda text: _logger.error("octopage: %s", text))
            self._new = self._verifier.functions
            self._plan = names[PLAN]
        else:
            self._new = adapted(module)
        self._old = {name: names[name] for name in self._new}

    def stands(self, module):
        return module is self._module and all(vars(module).get(n) is new for n, new in self._new.items())

    def compared(self):
        return {} if self._verifier is None else dict(self._verifier.compared)

    def do(self):
        by_id = {id(old): (old, self._new[name]) for name, old in self._old.items()}
        for namespace in [vars(self._module), *_namespaces()]:
            for key, value in list(namespace.items()):
                old, new = by_id.get(id(value), (None, None))
                if old is not None and value is old:
                    namespace[key] = new
                    self._undo.append((namespace, key, old, new))
        if self._plan is not None:
            # The class itself stays: objects, subclasses and isinstance keep working. Its methods compare.
            self._methods = {name: vars(self._plan).get(name) for name in self._verifier.methods}
            for name, method in self._verifier.methods.items():
                setattr(self._plan, name, method)

    def undo(self):
        for namespace, key, old, new in self._undo:
            if namespace.get(key) is new:
                namespace[key] = old
        for name, method in ({} if self._plan is None else self._methods).items():
            if vars(self._plan).get(name) is self._verifier.methods[name]:
                if method is None:
                    delattr(self._plan, name)
                else:
                    setattr(self._plan, name, method)


def _namespaces():
    """The dictionaries of all modules. Modules that load lazily are not woken."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            yield types.ModuleType.__getattribute__(module, "__dict__")
