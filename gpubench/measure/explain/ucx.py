"""How UCX moves GPU memory between processes, from the protocol tables in its log: rows, causes and gaps."""

from collections.abc import Iterator

from gpubench.conditions.checks import merged, transfer_findings
from gpubench.conditions.circumstances import Sighting, joined
from gpubench.conditions.registry import CONDITIONS
from gpubench.model.paths.ucx import ProtocolRange, ProtocolTable, Transfer, UcxLog, UcxRoute
from gpubench.model.results.fallback import NO_PAYLOAD_TABLES, PATH_UNKNOWN, KvPathRow
from gpubench.model.results.required_path import TakenPath
from gpubench.model.terms.units import format_size, plural
from gpubench.model.terms.verdict import Cure, Finding, Verdict

_LARGE_BYTES = 2**20  # Frameworks send a KV cache in blocks of 64 KiB to some MiB. Smaller messages are often copied.
_MANY_BLOCKS, _MOST_BLOCK_US = 256, 20.0  # A block took 4 to 11 µs on direct paths of H100s and H200s
_OPERATIONS = {
    "remote memory write": "put",
    "remote memory read": "get",
    "rendezvous data fetch": "fetch",
    "rendezvous data send": "send",
}
_SCOPES = {True: "node", False: "network", None: "unknown"}
TABLES = Cure.of(
    "export UCX_PROTO_INFO=y",
    comment="Start both processes again with this variable, let them transfer data, and pass both logs to "
    "`gpubench explain`.",
)
_KNOWN = "protocols of UCX 1.13 to 1.23"


def rows(log: UcxLog) -> Iterator[KvPathRow]:
    """Yield one row per range of sizes in each table of GPU memory."""
    verdicts = {
        subject: finding.severity for finding in transfer_findings(transfers(log)) for subject in finding.subjects
    }
    for table in log.payloads:
        source, destination = _ends(table)
        for row in table.ranges:
            yield KvPathRow(
                process=table.process,
                scope=_SCOPES[table.same_node],
                operation=_operation(table),
                source=source,
                destination=destination,
                first_bytes=row.first_bytes,
                last_bytes=row.last_bytes,
                protocol=row.description,
                transport=row.devices,
                route=row.route,
                host_staged=row.route.host_staged,
                verdict=_verdict(table, row, verdicts.get(_name(table), Verdict.PASS)),
            )


def taken_paths(log: UcxLog) -> Iterator[TakenPath]:
    """Yield the paths of large messages, for --require-path.

    The sender's estimate counts as unknown, unless the log has what the receiver chose.
    """
    is_chosen = any(_operation(table) in ("fetch", "send") and _large_row(table) for table in log.payloads)
    for table in log.payloads:
        source, destination = _ends(table)
        large = _large_row(table)
        is_guess = large is not None and _is_guess(table, large)
        for row in table.ranges:
            if (row is large and not (is_guess and is_chosen)) or _is_staged_large(row):
                yield TakenPath(
                    name=_name(table),
                    ends=((table.process, source), (table.process, destination)),
                    is_inside=table.same_node,
                    transports=tuple(row.devices.split(", ")) if row.devices else (),
                    host_staged=None if row is large and is_guess else row.route.host_staged,
                )


def _verdict(table: ProtocolTable, row: ProtocolRange, of_transfer: Verdict) -> Verdict:
    if row.last_bytes is not None:
        return Verdict.WARN if _is_staged_large(row) else Verdict.SKIP
    if not row.moves_data or _is_guess(table, row):
        return Verdict.SKIP
    if row.route is UcxRoute.PEER:
        return Verdict.PASS
    return Verdict.WARN if row.route is UcxRoute.UNKNOWN else of_transfer


def _is_staged_large(row: ProtocolRange) -> bool:
    """True if messages of 1 MiB are host-staged, although larger ones may not be."""
    return row.route.host_staged is True and row.last_bytes is not None and row.last_bytes >= _LARGE_BYTES


def _is_guess(table: ProtocolTable, row: ProtocolRange) -> bool:
    """True if the row says that a message goes directly, but its receiver decides."""
    return row.is_estimate and _operation(table) == "message" and row.route.host_staged is False


def _large_row(table: ProtocolTable) -> ProtocolRange | None:
    """Return the row for the largest messages. None if the log lacks it, or if it moves no data."""
    return next((row for row in table.ranges if row.last_bytes is None and row.moves_data), None)


def transfers(log: UcxLog) -> list[Transfer]:
    """Return one transfer per table of GPU memory, with the facts in the log that may explain its path."""
    # Two host names with the same process ID may be containers of one node, if both have a peer on their node.
    processes = {table.process for table in log.tables if table.same_node and table.process}
    shares_pid = len({process.rpartition(":")[2] for process in processes}) < len(processes)
    found: dict[tuple[str, str, str], Transfer] = {}
    for table in log.payloads:
        row = _large_row(table)
        if row is None or row.route is UcxRoute.UNKNOWN or _is_guess(table, row):
            continue
        # UCX prints up to three tables per operation, which differ in when the operation is complete.
        found[_name(table), row.route, row.devices] = Transfer(
            name=_name(table),
            route=row.route,
            transport=row.devices,
            local=table.local,
            remote=table.remote,
            same_node=table.same_node,
            same_pid_namespace=False if log.pid_namespaces_differ else None,
            shares_pid=shares_pid and table.same_node,
            variables={**log.variables.get("", {}), **log.variables.get(table.process, {})},
            missing_transports=tuple(log.missing),
            excluded_transports=tuple(log.excluded),
            get_disabled=(log.get_disabled and _operation(table) == "get") or None,
        )
    return list(found.values())


def _operation(table: ProtocolTable) -> str:
    return next((word for words, word in _OPERATIONS.items() if table.operation.startswith(words)), "message")


def _ends(table: ProtocolTable) -> tuple[str, str]:
    """Return the memory that is read, and the memory that is written."""
    is_read = _operation(table) in ("get", "fetch")
    return (table.remote, table.local) if is_read else (table.local, table.remote)


def _name(table: ProtocolTable) -> str:
    source, destination = _ends(table)
    named = f"{source} → {destination}" if destination else f"message from {source}"
    return f"{table.process} {named}" if table.process else named


def findings(log: UcxLog) -> Iterator[Finding]:
    """Yield causes of host-staged transfers, then everything else that UCX's tables and lines leave in doubt."""
    yield from transfer_findings(transfers(log))
    unknown: list[Finding] = []
    for table in log.payloads:
        row, name = _large_row(table), _name(table)
        if row is not None and row.route is UcxRoute.UNKNOWN:
            seen = f"unknown protocol {row.description!r} over {row.config!r}"
            unknown.append(_doubt(PATH_UNKNOWN, name, seen, _KNOWN, "a newer UCX, or a damaged line"))
        partly = [row for row in table.ranges if _is_staged_large(row)]
        if partly and row is not None and row.route.host_staged is False:
            last = format_size(partly[-1].last_bytes or 0)
            seen = f"{partly[-1].description} over {partly[-1].devices} up to {last}"
            yield _doubt("kv-staged-unexplained", name, seen, "a direct path for blocks of 1M", "UCX's threshold")
    yield from merged(unknown)
    yield from _block_cost(log)
    if missing := [name for name in log.missing if name in ("cuda_copy", "cuda_ipc")]:
        condition = next(condition for condition in CONDITIONS if condition.id == "ucx-without-cuda")
        seen = f"UCX warns that {joined(missing)} {'are' if len(missing) > 1 else 'is'} not available"
        yield from condition.to_findings([Sighting(subject="UCX", seen=seen, severity=Verdict.WARN)])


def _block_cost(log: UcxLog) -> Iterator[Finding]:
    """Yield a remark if many blocks slow down the transfers of vLLM, and the path is direct."""
    metrics = log.metrics
    large = [row for table in log.payloads if (row := _large_row(table)) is not None]
    is_direct = bool(large) and all(row.route.host_staged is False for row in large)
    if metrics is not None and is_direct and metrics.blocks >= _MANY_BLOCKS and metrics.block_us <= _MOST_BLOCK_US:
        yield Finding(
            "kv-block-cost",
            Verdict.SKIP,
            "vLLM's transfers",
            f"{metrics.blocks:,.0f} blocks per transfer take {metrics.block_us:.1f} µs each, {metrics.mb_s:,.0f} "
            "MB/s (a cost per block, not a fallback)",
            "blocks that are large enough for the full bandwidth",
            "each block is a separate copy, which takes 4 to 11 µs on a direct path, regardless of its size",
            Cure(comment="Choose larger blocks (vLLM --block-size), or a KV layout that has all layers in one block."),
        )


def _doubt(id_: str, subject: str, seen: str, expected: str, cause: str) -> Finding:
    return Finding(id_, Verdict.WARN, subject, seen, expected, cause, TABLES)


def missing_payload(log: UcxLog, name: str) -> Finding | None:
    """Return the finding for a log of UCX or NIXL that does not show how GPU memory moves. None for other logs."""
    if log.payloads:
        has_large = any(row.last_bytes is None for table in log.payloads for row in table.ranges)
        seen = "the sender only estimates the path" if has_large else "the path of large messages is not in the log"
    elif log.tables:
        seen = f"{plural(len(log.tables), 'protocol table')}, none for GPU memory at both ends"
    elif log.lines:
        seen = f"{plural(log.lines, 'line')} by UCX or NIXL, without protocol tables"
    else:
        return None
    if log.metrics is not None:
        per_block = f"{log.metrics.block_us:.1f} µs per block ({log.metrics.blocks:,.0f})"
        seen += f"; vLLM reports {log.metrics.mb_s:,.0f} MB/s, and {per_block}"
    return Finding(
        NO_PAYLOAD_TABLES,
        Verdict.SKIP,
        name,
        seen,
        "a protocol table such as: remote memory write by ucp_put* from cuda/GPU0 to cuda/dev[1]",
        "UCX prints it if UCX_PROTO_INFO=y is set, in the process that starts the first transfer of GPU memory",
        TABLES,
    )


def is_judged(log: UcxLog) -> bool:
    """True if the log shows how UCX moves large messages between some GPUs."""
    return any((row := _large_row(table)) is not None and not _is_guess(table, row) for table in log.payloads)
