"""Patches of PyTorch and the standard library while any fake device is in use.

Modules that need to see a call (`host_threads`, `autograd`, `graphs`) register a replacement with
`patch`. The replacements are installed with the first device and removed with the last.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice

devices: list[FakeDevice] = []
#: The original of each patched name. Kept after the end: a thread may still be inside a patch.
originals: dict[str, Any] = {}
_originals: dict[tuple[Any, str], Any] = {}
_patches: list[tuple[Any, str, Any]] = []
_INHERITED = object()
#: Names that a class inherits: restoring them means deleting them.
_inherited: set[tuple[Any, str]] = set()


def patch(owner: Any, name: str, replacement: Any) -> None:
    """Replace `owner.name` while any fake device is in use. If the owner is a module, the name is
    also replaced in modules that imported it from there."""
    _patches.append((owner, name, replacement))


def original(owner: Any, name: str) -> Any:
    """The original of a name that several owners have; else `originals[name]` is shorter."""
    return _originals[owner, name]


def install(device: FakeDevice) -> None:
    """Begin to watch threads, locks and autograd for `device`."""
    if not devices:
        for owner, name, replacement in _patches:
            # From the dict, not by getattr, so that a class method is restored as one. If an
            # interrupt kept the last device from restoring a name, its original is already here.
            found = vars(owner).get(name, _INHERITED)
            if found is not replacement:
                if found is _INHERITED:
                    found = getattr(owner, name)
                    _inherited.add((owner, name))
                originals[name] = _originals[owner, name] = found
        try:
            _exchange([(owner, name, original(owner, name), new) for owner, name, new in _patches])
        except BaseException:
            _restore()
            raise
    devices.append(device)


def remove(device: FakeDevice) -> None:
    """Stop watching for `device`. After the last device, every name has its original again."""
    devices.remove(device)
    if not devices:
        _restore()


def _restore() -> None:
    _exchange([(owner, name, patched, original(owner, name)) for owner, name, patched in _patches])


def _exchange(changes: list[tuple[Any, str, Any, Any]]) -> None:
    """For each (owner, name, old, new): replace the old value by the new one. One pass over the
    modules serves all names: there are thousands of modules, and every fake device does this."""
    imported: dict[str, tuple[Any, Any]] = {}
    for owner, name, old, new in changes:
        if new is original(owner, name) and (owner, name) in _inherited:
            if name in vars(owner):
                delattr(owner, name)
        else:
            setattr(owner, name, new)
        if isinstance(owner, ModuleType):
            imported[name] = (old, new)
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name in names.keys() & imported.keys():  # most modules have none
            old, new = imported[name]
            # The standard library's own locks hand nothing over between the user's threads.
            is_standard = module_name.partition(".")[0] in sys.stdlib_module_names
            if names[name] is old and not is_standard:
                names[name] = new
