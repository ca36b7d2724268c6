"""Registers Q-Margin when WeSpeaker is imported; see `wespeaker-qmargin enable`.

`enable` copies this file into site-packages, with a .pth file that puts a finder into every start
of Python; the finder imports this file when somebody asks for ``wespeaker``.
"""

import importlib.util
import sys


def find_spec(finder):
    """Return the spec of ``wespeaker`` with a loader that registers; None leaves it as it is."""
    # our own commands and the launcher see to it themselves
    if "wespeaker_qmargin" in sys.modules:
        return None
    place = sys.meta_path.index(finder)
    sys.meta_path.remove(finder)
    try:
        spec = importlib.util.find_spec("wespeaker")
    finally:
        sys.meta_path.insert(place, finder)
    if spec is None or spec.origin is None:
        return spec
    return importlib.util.spec_from_file_location(
        spec.name,
        spec.origin,
        loader=_Registering(spec.loader, finder),
        submodule_search_locations=spec.submodule_search_locations,
    )


class _Registering:
    def __init__(self, theirs, finder):
        self._theirs, self._finder = theirs, finder

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        sys.meta_path.remove(self._finder)
        module.__loader__ = module.__spec__.loader = self._theirs
        try:
            from wespeaker_qmargin.enable import wake
        except ImportError as error:
            print(
                f"wespeaker-qmargin is enabled here, but cannot be imported ({error}): "
                f"install it again, or remove {__file__} and the .pth file beside it",
                file=sys.stderr,
            )
            self._theirs.exec_module(module)
            return
        del sys.modules["wespeaker"]
        wake()
