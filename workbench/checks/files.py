"""Files that stand in for others. The drafter's own weights are judged on opening; here are the map files that lie beside them."""

from collections.abc import Iterable

from workbench.case import Case
from workbench.checks import check, finding
from workbench.checks.map import SIDE_FILE
from workbench.errors import InputError
from workbench.findings import Finding
from workbench.torch_file import torch_header
from workbench.weights import stand_in_for_weights

STAND_INS = ("file-pointer", "file-not-weights", "file-truncated", "file-pickle")


@check(*STAND_INS, "shard-missing", "wrong-model")
def side_files(case: Case) -> Iterable[Finding]:
    """Map files beside the weights that are pointers, pages, cut or unsafe pickles."""
    place = case.drafter.place
    for name in place.files:
        if not SIDE_FILE.fullmatch(name):
            continue
        try:
            fault = stand_in_for_weights(place, name)
            if fault is None and name.endswith(".pt"):
                torch_header(place, name)
        except InputError as error:
            fault = error
        if fault is not None and fault.code in STAND_INS:
            yield finding(fault.code, "error", str(fault), place.where(name), bytes=place.files[name])
