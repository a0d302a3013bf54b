"""The driver's settings that NVML has: confidential computing, and NVLinks held below their full bandwidth.

Not seen on hardware that has either: written after nvml.h, and checked with a stand-in for NVML.
"""

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any

from gpubench.hardware.node.nvml.answers import Answers, word_of
from gpubench.model.facts.driver_settings import ConfidentialComputing, DriverSettings

_ENVIRONMENTS = ("unavailable", "simulation", "production")
_MULTI_GPU = ("none", "protected_pcie", "nvle")
_BANDWIDTH_MODES = ("full", "off", "min", "half", "3quarter")
"""NVML_CC_SYSTEM_ENVIRONMENT_*, NVML_CC_SYSTEM_MULTIGPU_* and NVML_GPU_NVLINK_BW_MODE_* in nvml.h, from 0 on."""

_UNKNOWN_TO_PYNVML = "this nvidia-ml-py does not know of it"


def read_settings(library: Any, handles: Mapping[int, object]) -> DriverSettings:
    """The settings, from a pynvml that is initialised; `handles` are those of the GPUs that answer, by index."""
    unknown: dict[str, str] = {}
    return DriverSettings(
        confidential_computing=_confidential_computing(library, unknown),
        nvlink_bandwidth_mode=_bandwidth_mode(library, unknown),
        nvlink_bandwidth_reduced=_bandwidth_reduced(library, handles, unknown),
        unknown=unknown,
    )


def _confidential_computing(library: Any, unknown: dict[str, str]) -> ConfidentialComputing | None:
    """Its settings, else its state, which older drivers know, without the mode of several GPUs."""
    with contextlib.suppress(AttributeError, library.NVMLError):
        form = library.c_nvmlSystemConfComputeSettings_v1_t()
        if library.nvmlSystemGetConfComputeSettings(ctypes.byref(form)) == 0:
            return _conf_compute(form, word_of(_MULTI_GPU, form.multiGpuMode))
    state = _answer(library, "nvmlSystemGetConfComputeState", "confidential_computing", unknown)
    return None if state is None else _conf_compute(state, None)


def _answer(library: Any, function: str, setting: str, unknown: dict[str, str]) -> Any:
    """The answer to a question about the whole system; None, with the reason kept, where there is none."""
    try:
        return getattr(library, function)()
    except AttributeError:
        unknown[setting] = _UNKNOWN_TO_PYNVML
    except library.NVMLError as error:
        unknown[setting] = str(error)
    return None


def _conf_compute(form: Any, multi_gpu: str | None) -> ConfidentialComputing:
    return ConfidentialComputing(
        enabled=form.ccFeature == 1,
        developer_tools=form.devToolsMode == 1,
        environment=word_of(_ENVIRONMENTS, form.environment),
        multi_gpu=multi_gpu,
    )


def _bandwidth_mode(library: Any, unknown: dict[str, str]) -> str | None:
    mode = _answer(library, "nvmlSystemGetNvlinkBwMode", "nvlink_bandwidth_mode", unknown)
    word = word_of(_BANDWIDTH_MODES, mode)
    if mode is not None and word is None:
        unknown["nvlink_bandwidth_mode"] = f"NVML answers {mode}, which nvml.h does not name"
    return word


def _bandwidth_reduced(library: Any, handles: Mapping[int, object], unknown: dict[str, str]) -> tuple[str, ...] | None:
    """The GPUs whose own mode is not the best one; None where no GPU has modes of its own (before Blackwell)."""
    form = getattr(library, "c_nvmlNvlinkGetBwMode_v1_t", None)
    if form is None:
        unknown["nvlink_bandwidth_reduced"] = _UNKNOWN_TO_PYNVML
        return None
    is_best: dict[int, bool] = {}
    reason = "there is no GPU that answers"
    for index, handle in handles.items():
        asked = form()
        reply = Answers(library, handle).call("nvmlDeviceGetNvlinkBwMode", ctypes.byref(asked))
        if reply.value is None:
            reason = reply.reason
        else:
            is_best[index] = bool(asked.bIsBest)
    if not is_best:
        unknown["nvlink_bandwidth_reduced"] = reason
        return None
    return tuple(f"GPU{index}" for index, best in is_best.items() if not best)
