"""NCCL's words for how far apart two devices are."""

from gpubench.model.paths.topology import allows, is_within, level, nccl_type


def test_levels() -> None:
    assert [level(word) for word in ("LOC", "nvl", "0", "1", "2", "3", "4", "9", "")] == [
        *("LOC", "NVL", "LOC", "PIX", "PXB", "PHB", "SYS", None, None)
    ]
    assert is_within("PXB")
    assert not is_within("PHB")
    assert is_within("PHB", "SYS")
    assert not is_within("new")


def test_path_classes_in_nccls_words() -> None:
    assert [nccl_type(path) for path in ("NV18", "PIX", "NODE", "SYS", "?", "NET")] == [
        *("NVL", "PIX", "PHB", "SYS", None, None)
    ]
    assert allows("SYS", "NODE")
    assert not allows("PHB", "SYS")
    assert not allows("nonsense", "PIX")
    assert not allows("SYS", "?")
