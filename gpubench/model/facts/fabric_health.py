"""The health mask of a GPU's registration with the NVLink fabric."""

_CONDITION_SHIFTS = {
    "degraded_bandwidth": 0,
    "route_recovery": 2,
    "route_unhealthy": 4,
    "access_timeout_recovery": 6,
    "partition_missing": 12,
    "fabric_manager_disconnected": 14,
}
_CONFIGURATION_SHIFT = 8
_CONFIGURATIONS = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "GPU state invalid",
}
HEALTH_CONDITIONS = (*_CONDITION_SHIFTS, "incorrect_configuration")
_GOOD_WHEN_TRUE = ("partition_missing", "fabric_manager_disconnected")


def decode_health(mask: int) -> dict[str, bool | None]:
    """The bad conditions in a fabric's health mask: true, false, or None where driver or GPU do not tell.

    Fields are two bits wide, 1 for true and 2 for false, so 0xaa is healthy. In the two that name something good (a
    partition is assigned, the fabric manager is connected) true and false change places here. From bit 8 on stands a
    number of four bits, 1 for a correct configuration (`NVML_GPU_FABRIC_HEALTH_MASK_*` in nvml.h).
    """
    conditions: dict[str, bool | None] = {}
    for name, shift in _CONDITION_SHIFTS.items():
        value = {1: True, 2: False}.get(mask >> shift & 3)
        conditions[name] = not value if name in _GOOD_WHEN_TRUE and value is not None else value
    configuration = mask >> _CONFIGURATION_SHIFT & 0xF
    conditions["incorrect_configuration"] = None if configuration == 0 else configuration != 1
    return conditions


def describe_health(mask: int) -> str:
    """A health mask in words: 'healthy', 'not reported', or the bad conditions."""
    conditions = decode_health(mask)
    configuration = _CONFIGURATIONS.get(mask >> _CONFIGURATION_SHIFT & 0xF)
    bad = [
        name.replace("_", " ") + (f" ({configuration})" if name == "incorrect_configuration" and configuration else "")
        for name, holds in conditions.items()
        if holds
    ]
    if bad:
        return ", ".join(bad)
    return "not reported" if all(holds is None for holds in conditions.values()) else "healthy"
