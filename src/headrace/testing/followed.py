"""Which fake devices are in use, and what is put in place of PyTorch's and Python's own meanwhile.

The modules that need to see a call (`host_threads`, `autograd`) say so with `patch`; the patches
are in place from the first device's `follow` to the last one's `unfollow`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.fake import FakeDevice

devices: list[FakeDevice] = []
#: What each patched name was. Kept after the end: a thread may still be on its way through a patch.
originals: dict[str, Any] = {}
_patches: list[tuple[Any, str, Any]] = []


def patch(owner: Any, name: str, replacement: Any) -> None:
    """Put `replacement` in place of `owner.name` while any fake device is in use; if the owner is
    a module, also where others have imported the name from it."""
    _patches.append((owner, name, replacement))


def follow(device: FakeDevice) -> None:
    """Begin to see what threads, locks and autograd do, for `device`."""
    if not devices:
        for owner, name, replacement in _patches:
            # From the dict, not by getattr: a class method must be put back as one. An interrupt
            # may have kept the last device from putting everything back.
            if vars(owner)[name] is not replacement:
                originals[name] = vars(owner)[name]
        try:
            _exchange([(owner, name, originals[name], new) for owner, name, new in _patches])
        except BaseException:
            _put_back()
            raise
    devices.append(device)


def unfollow(device: FakeDevice) -> None:
    """Stop for `device`; after the last one, everything is as it was."""
    devices.remove(device)
    if not devices:
        _put_back()


def _put_back() -> None:
    _exchange([(owner, name, patched, originals[name]) for owner, name, patched in _patches])


def _exchange(changes: list[tuple[Any, str, Any, Any]]) -> None:
    """For each (owner, name, old, new): put the new value in place of the old one. All in one pass
    over the modules: there are thousands, and this is done for every fake device."""
    imported: dict[str, tuple[Any, Any]] = {}
    for owner, name, old, new in changes:
        setattr(owner, name, new)
        if isinstance(owner, ModuleType):
            imported[name] = (old, new)
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name in names.keys() & imported.keys():  # of most modules, none
            old, new = imported[name]
            # The standard library's own locks are no hand-over between the user's threads.
            is_standard = module_name.partition(".")[0] in sys.stdlib_module_names
            if names[name] is old and not is_standard:
                names[name] = new
