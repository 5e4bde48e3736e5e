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
            # From the dict, not by getattr: a class method must be put back as one.
            originals[name] = vars(owner)[name]
            _put(owner, name, originals[name], replacement)
    devices.append(device)


def unfollow(device: FakeDevice) -> None:
    """Stop for `device`; after the last one, everything is as it was."""
    devices.remove(device)
    if not devices:
        for owner, name, replacement in _patches:
            _put(owner, name, replacement, originals[name])


def _put(owner: Any, name: str, old: Any, new: Any) -> None:
    setattr(owner, name, new)
    if not isinstance(owner, ModuleType):
        return
    for module_name, module in list(sys.modules.items()):
        # The standard library's own locks are no hand-over between the user's threads.
        if module_name.partition(".")[0] not in sys.stdlib_module_names:
            names = getattr(module, "__dict__", {})
            if names.get(name) is old:
                names[name] = new
