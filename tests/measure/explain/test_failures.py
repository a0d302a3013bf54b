"""Lines that end a job, planted into a healthy log."""

import re
from pathlib import Path

import pytest

from gpubench.conditions.hangs import HANGS
from gpubench.conditions.registry import CONDITIONS
from gpubench.jobs.failed_runs import failures_in
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.results.nccl_tests.table import ELEMENT_TYPES
from tests.fakes.nccl_logs import Job
from tests.measure.explain.test_report import ids, report_of, via

JOB = Job()
WARNED = JOB.head(0).replace(" INFO ", " transport/net.cc:120 NCCL WARN ").replace(" NCCL transport", " transport")
ROW = "     8388608       2097152    "
TESTS = "# nThread 1 nGpus 4 minBytes 8 maxBytes 128 step: 2(factor) warmup iters: 5 iters: 20 validation: 1"
FAILED = {
    "shm-too-small": [
        f"{WARNED}Error: failed to extend /dev/shm/nccl-AbCdEf to 33030532 bytes, error: No space left on device (28)",
        f"{WARNED}Call to posix_fallocate failed : No space left on device",
        f"{WARNED}Error while creating shared memory segment /dev/shm/nccl-AbCdEf (size 9637888)",
    ],
    "nccl-version-mismatch": [
        f"{WARNED}Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22703",
        f"{WARNED}NCCL version mismatch with remote peer 10.0.0.2<4000> (local: 2.28.9, remote 2.27.3)",
    ],
    "nccl-duplicate-gpu": [f"{WARNED}Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000"],
    "cuda-device-missing": ["nodeA: Test CUDA failure common.cu:963 'invalid device ordinal'"],
    "nccl-no-socket-interface": [f"{WARNED}Bootstrap : no socket interface found"],
    "nccl-connect-failed": [
        f"{WARNED}socketStartConnect: Connect to 10.0.0.2<4000> failed : Software caused connection abort",
        f"{WARNED}socketPollConnect: connect to 10.0.0.2<4000> returned Connection refused, exceeded error retry count",
        f"{WARNED}Call to connect to 10.0.0.2<4000> failed : No route to host",
    ],
    "nccl-no-transport": [f"{WARNED}No transport found for rank 0[1a000] -> rank 1[1b000]"],
    "cuda-out-of-memory": [f"{WARNED}Cuda failure 2 'out of memory'", f"{WARNED}Failed to CUDA malloc 8388608 bytes"],
    "cuda-refuses": [
        "nodeA: Test CUDA failure common.cu:941 'system not yet initialized'",
        f"{WARNED}Cuda failure 802 'system not yet initialized'",
    ],
    "cuda-ipc-refused": [
        f"{WARNED}failed to open CUDA IPC handle : 217 peer access is not supported between these two devices",
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
    ],
    "nvls-slots-used-up": [
        f"{WARNED}Failed to bind NVLink SHARP (NVLS) Multicast memory of size 1 : CUDA error 2 'out of memory'."
    ],
    "nvls-setup-failed": [
        WARNED.replace("transport/net.cc:120", "transport/nvls.cc:254")
        + "Cuda failure 401 'the operation cannot be done'",
        f"{WARNED}Failed to bind NVLink SHARP (NVLS) Multicast memory of size 1 : CUDA error 1 'invalid argument'.",
    ],
    "nccl-cuda-call-failed": [
        f"{WARNED}Cuda failure 'unspecified launch failure'",
        "nodeA: Test CUDA failure common.cu:297 'an illegal memory access was encountered'",
    ],
    "nccl-invalid-usage": [
        f"{WARNED}Bootstrap Root : rank 1 of 4 ranks has already checked in",
        f"{WARNED}Message truncated : received 1024 bytes instead of 256",
        f"{WARNED}AllReduce : invalid root 9 (root should be in the 0..4 range)",
    ],
    "nccl-ranks-disagree": [
        f"{WARNED}NET/IB : req 0/1 tag 0 peer 10.0.0.2<58683> collective mismatch error, local size 8 remote size 4"
    ],
    "kv-mnnvl-refused": [
        "[1.0] [vm:1477:0] cuda_ipc_md.c:421 UCX  ERROR multi-node NVLINK support is requested but not supported"
    ],
    "kv-transfer-failed": [
        "E0506 01:57:14.458004 726538 nixl_agent.cpp:1116] postXferReq: backend failed: NIXL_ERR_BACKEND",
        "[1.0] [h:7:0] proto_reconfig.c:48  UCX  ERROR cannot find remote protocol for: c cfg#2 | put to rocm",
        "W0616 05:58:30.439247   10805 ucx_utils.cpp:43] Unexpected UCX error: Endpoint timeout",
        "pml_ucx.c:934  Error: ucx send failed: Input/output error",
        (
            "[1.0] [h:7:0] ucp_ep.c:1508 UCX  DIAG  ep 0x7f: error 'Input/output error' on rc_mlx5/mlx5_0:1 will "
            "not be handled since no error callback is installed"
        ),
    ],
    "nic-failed-over": [
        f"{WARNED}NET/IB: ncclIbResiliencyHandleDeviceFailure: Device 0 marked as failed. Initiating recovery? Yes",
        f"{WARNED}NET/IB: Device 1 marked as failed. Initiating recovery? No (recv comm=0x7f, outstandingRecovery=1)",
    ],
    "collnet-not-used": [f"{WARNED}NET/IB :SHARP coll init error: Cannot create SHArP job(-8)"],
    "communicators-aborted": [
        f"{WARNED}[Service thread] Could not receive type from localRank 2, res=3, closed=0",
        f"{WARNED}[Service thread] Accept failed Resource temporarily unavailable",
        f"{WARNED}[Proxy Service 1] Failed to execute operation Close from rank 2, retcode 3",
    ],
    "gin-not-enabled": [
        f"{WARNED}GIN not supported.",
        f"{WARNED}User requested GIN but not all ranks in the communicator support GIN",
        f"{WARNED}Unable to use GIN: Peermem is not supported, and device 0 does not support DMA-BUF.",
        f"{WARNED}No GIN-capable devices found.",
    ],
    "rdma-registration-failed": [f"{WARNED}Call to ibv_reg_mr failed with error Cannot allocate memory"],
    "network-plugin-failed": [
        "nodeA:1:2 [0] int cm_error(nccl_net_ofi_context_t*, fid_cq*):46 NCCL WARN NET/OFI Request failed. RC: 103",
        "worker-0: [0] x.cc:10 NCCL WARN NET/OFI Request failed. RC: 103",
        f"{WARNED}NET/OFI Creating new endpoint for domain 0x7f9befa99380 failed: Invalid argument",
        f"{WARNED}NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument",
    ],
    "rdma-retry-exceeded": [
        f"{WARNED}NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
        f"{WARNED}NET/IB : Got completion from peer 10.0.0.2<4000> with status=12 opcode=1 len=0 vendor err 129 (Send)",
        "UCX  ERROR   mlx5_0:1: Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15)",
        " Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81",
        "NET/IBP:Got completion from peer 10.0.0.2<4000> with status=12 opcode=32698 len=32696 vendor err 129 (Send)",
        f"{WARNED}NET/IB: Got completion from peer 10.0.0.2<4000> with status=IBV_WC_RETRY_EXC_ERR(12)",
    ],
    "rdma-port-down": [
        f"{WARNED}NET/IB : Got async event : port error",
        f"{WARNED}NET/IB : mlx5_0:1 Got async event : port error",
        f"{WARNED}NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)",
    ],
    "rdma-completion-error": [
        f"{WARNED}NET/IB : Got completion with error 4, opcode 0, len 0, vendor err 81",
        f"{WARNED}NET/IB : Got async event : local catastrophic error",
        f"{WARNED}NET/IB : mlx5_0:1 Got async event : local access violation work queue error",
        f"{WARNED}NET/IB : mlx5_1:1 async fatal event on QP (0x7309dc3bb338): invalid request local work queue error",
    ],
    "collective-timed-out": [
        "ERROR: Some NCCL operations have failed or timed out.",
        "[rank6]:[E ProcessGroupNCCL.cpp:5] [Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    ],
    "remote-process-exited": [
        f"{WARNED}socketProgress: Connection closed by remote peer nodeB<4000>",
        f"{JOB.head(0)}misc/socket.cc:749 -> 6",
        "E nccl_utils.cc:191] Aborting communicator: 0x55 due to async NCCL error: remote process exited or else",
        "DistBackendError: NCCL error in: init.cpp:3, remote process exited or there was a network error",
    ],
    "program-failed": [
        "srun: error: nodeA: task 3: Killed",
        "slurmstepd: error: *** STEP 1.0 ON nodeA CANCELLED AT 2025-01-01T10:00:00 DUE TO TIME LIMIT ***",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.",
        "mpirun detected that one or more processes exited with non-zero status, thus causing the job to end",
        "command terminated with exit code 137",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "[rank0]:[F1 ProcessGroupNCCL.cpp:1413] [PG 0] Terminating the process after attempting to dump debug info",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "mpirun noticed that process rank 1 with PID 7 on node nodeA exited on signal 9 (Killed).",
        "srun: error: nodeA: task 0: Exited with exit code 1",
        "Bus error (core dumped)",
        "[nodeA:00123] *** An error occurred in MPI_Allreduce",
        "[nodeA:00123] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
        "[nodeA:7:0:7] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)",
        "python: malloc.c:2617: sysmalloc: Assertion `(old_top == initial_top (av))' failed.",
        "double free or corruption (!prev)",
        "free(): invalid pointer",
        "*** SIGSEGV received at time=1747000000 on cpu 12 ***",
        "[nodeA:7] Signal: Segmentation fault (11)",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0 cgroup.",
        "Fatal error in PMPI_Allreduce: Other MPI error, error stack:",
        "Engine core proc EngineCore_0 died unexpectedly, shutting down client.",
        "Primary job  terminated normally, but 1 process returned",
    ],
    "nccl-call-failed": [
        f"{WARNED}[Proxy Service 0] Failed to execute operation Connect from rank 0, retcode 2",
        f"{JOB.head(0)}transport/shm.cc:590 -> 2\n{JOB.head(0)}transport.cc:183 -> 2\n{JOB.head(0)}group.cc:73 -> 2",
        f"{JOB.head(0)}init.cc:1234 (initTransportsRank) -> 2",
        f"{JOB.head(0)}include/net.h:25 -> 2\n{JOB.head(0)}transport/net.cc:515 -> 2",
        f"{JOB.head(0)}transport/p2p.cc:9 -> 3\n{JOB.head(0)}enqueue.cc:9 -> 3",
        "RuntimeError: NCCL Error 1: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "core/common_runtime: Internal: NCCL: unhandled system error",
        "jaxlib.XlaRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error.",
    ],
    "nccl-diag-failed": [
        "nodeA:100 NCCL DIAG [INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification",
        "nodeA:100 NCCL DIAG [INFO] p2p: read mismatch rank=0 peer=1 expected=0x01 got=0x00; inspect",
        "nodeA:100 NCCL DIAG [INFO] ECC: 2 uncorrected volatile errors on rank(s) {3} in comm 0x1234",
        "NCCL DIAG [INFO] NVLink: 17 of 18 link(s) active on rank(s) {3} in comm 0x1234",
    ],
    "nccl-diag-doubt": [
        "nodeA:100 NCCL DIAG [INFO] net bw: cross-nic rank 3 (node0): 265.1 Gbit/s, >30% off median 391.5 Gbit/s",
        "nodeA:100 NCCL DIAG [INFO] net bw: required external tool missing in comm 0x1234",
        "nodeA:100 NCCL DIAG [INFO] NCCL environment: mismatch across 8 ranks in comm 0x1234 for NCCL_DEBUG",
    ],
    "shm-not-shared": [
        f"{WARNED}Error while attaching to shared memory segment /dev/shm/nccl-AbCdEf (size 0), error: No such file (2)"
    ],
    "imex-service-stopped": [f"{WARNED}MNNVL (cliqueSize 8) is available but not working on this system. Check IMEX"],
    "fabric-not-ready": [f"{WARNED}P2P is disabled between NVLINK connected GPUs 0 and 1. This should not be the case"],
    "rdma-connect-failed": [f"{WARNED}Call to ibv_modify_qp failed with 110 Connection timed out"],
    "nccl-tests-wrong-data": [
        "# Out of bounds values : 8 FAILED",
        f"{ROW} float     sum      -1    90.10   93.10  162.93      3    90.20   93.00  162.75      0",
        f"{ROW}  half    none       0    90.10   93.10   93.10      0    90.20   93.00   93.00  1e+06",
        f"[1,0]<stdout>:{ROW}  int8    none      -1    90.10   93.10   93.10    N/A    90.20   93.00   93.00      7",
        "     8388608    2097152   float     sum    90.10   93.10  162.93  2e+02    90.20   93.00  162.75  0e+00",
    ],
    "gpu-xid": [
        "[1.5] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python, GPU has fallen off the bus.",
        *(
            f"NVRM: Xid (PCI:0000:1b:00): {number}, pid='<unknown>', name=<unknown>, text"
            for number in (46, 48, 54, 62, 64, 74, 94, 95, 109, 119, 120, 136, 140, 143, 151, 156, 158, 167, 171, 172)
        ),
        "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        "kernel: NVRM: Xid (PCI:0000:1b:00): 155, NVLINK_SW_DEFINED_ERROR  Fatal   XC0 i0 Link 00 (0x1)",
        "kernel: NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x1 0x2)",
        "NVRM: GPU at PCI:0000:1b:00 has fallen off the bus.",
        "kernel: NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=python, Ch 1 caused by previous Xid 149",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    ],
    "gpu-xid-doubt": [
        "kernel: NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python, Ch 8, intr 0. MMU Fault: ENGINE GRAPHICS",
        "kernel: NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=python, Ch 1",
        *(
            f"NVRM: Xid (PCI:0000:1b:00): {number}, pid='<unknown>', name=<unknown>, text"
            for number in (13, 43, 61, 63, 92, 106, 121, 123, 137, 157, 160, 999)
        ),
        "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
        "kernel: NVRM: Xid (PCI:0000:1b:00): 155, NVLINK_SW_DEFINED_ERROR Nonfatal XC0 i0 Link 00 (0x1)",
        "kernel: NVRM: Xid (PCI:0000:1b:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (0x1 0x2)",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
    ],
    "nvlink-uncorrectable": [
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        f"{WARNED}Cuda failure 220 'uncorrectable NVLink error detected during the execution'",
    ],
    "pcie-fatal-error": [
        "pcieport 0000:c0:01.1: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
        "pcieport 0000:c0:01.1: AER: Multiple Uncorrectable (Fatal) error message received from 0000:c1:00.0",
        "[50.9] pcieport 0000:00:1b.0: DPC: containment event, status:0x1f01 source:0x0000",
    ],
    "pcie-error-doubt": [
        "kernel: pcieport 0000:00:1c.0: AER: Corrected error received: 0000:00:1c.0",
        "nvidia 0000:1b:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Receiver ID)",
        "igb 0000:09:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
    ],
    "network-link-down": [
        "[7.1] mlx5_core 0000:5e:00.0 ens1f0np0: Link down",
        "kernel: mlx5_core 0000:5e:00.0: Port module event[error]: module 0, Cable error, Bus stuck",
        "ixgbe 0000:01:00.0 eno1: NIC Link is Down",
    ],
    "ecc-uncorrectable": ["what():  CUDA error: uncorrectable ECC error encountered"],
    "nccl-tests-apart": [2 * f"{TESTS}\n" + 2 * "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 3.9\n"],
    "nccl-tests-unfinished": [
        TESTS,
        f"#       size         count      type   redop    root     time   algbw   busbw #wrong\n{ROW} float     sum",
    ],
    "program-exception": [
        "ValueError: shapes differ",
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nKeyboardInterrupt',
        (
            "Exception ignored in: <function F at 0x7f>\nTraceback (most recent call last):\nKeyError\n"
            '[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 3, in <module>'
        ),
        'Traceback (most recent call last):\n  File "train.py", line 3, in f\nException ignored in: <function F>',
    ],
    "nccl-warning": [f"{WARNED}something that nobody wrote yet"],
}
DOUBTS = (
    *(
        "gpu-xid-doubt",
        "nccl-warning",
        "collnet-not-used",
        "communicators-aborted",
        "nccl-diag-doubt",
        "program-exception",
        "kv-mnnvl-refused",
    ),
    *("pcie-error-doubt", "network-link-down", "nic-failed-over", "gin-not-enabled"),
    *("imex-service-stopped", "fabric-not-ready", "nccl-tests-unfinished", "nccl-tests-apart"),
)
WITHOUT_LINES = {
    *("nccl-init-unfinished", "mnnvl-unused", "nccl-nics-differ", "rdma-nic-not-opened"),
    *(condition.id for condition in HANGS.conditions),
}


def test_every_condition_that_ends_a_job_is_planted() -> None:
    assert FAILED.keys() | WITHOUT_LINES == {condition.id for condition in CONDITIONS if condition.in_job is not None}


@pytest.mark.parametrize(("id_", "text"), [(id_, text) for id_, texts in FAILED.items() for text in texts])
def test_what_ends_a_job_is_named_first(id_: str, text: str) -> None:
    report = report_of(*JOB.logs(), text + "\n")
    assert (ids(report)[0], len(report.findings)) == (id_, 1)
    assert report.verdict is (Verdict.WARN if id_ in DOUBTS else Verdict.FAIL)
    finding = report.findings[0]
    assert all((finding.seen, finding.cause, finding.expected, finding.cure, finding.subject))


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_wrong_elements_of_every_type_count_in_unfinished_runs(name: str) -> None:
    header = "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
    row = f"     1048576        131072  {name:>8}     sum      -1    30.10   34.84   52.25       7"
    assert ids(report_of(*JOB.logs(), f"{header}\n{row}\n"))[0] == "nccl-tests-wrong-data"
    well = row.removesuffix("7") + "0"
    assert ids(report_of(*JOB.logs(), f"{header}\n{well}\n"))[0] == "nccl-tests-unfinished"


@pytest.mark.parametrize(
    "text",
    [
        f"{WARNED}Failed to open libibverbs.so[.1]",
        f"{WARNED}NET/OFI Only EFA provider is supported",
        f"{WARNED}NCCL_WORK_FIFO_BYTES=3000 is being ignored because it is not a power of 2.",
        f"{WARNED}CollNet is not supported or fails to initialize, ignoring NCCL_ALGO=COLLNET",
        f"{WARNED}graphStreamOrdering=0 with graphUsageMode=2 (graph mixing) is not supported; falling back to 1",
        f"{WARNED}Warning: remote FLID configured as zero even when endpoints are on different subnets, using dlid",
        f"{WARNED}NCCL_DEVICE_UNPACK plugin has incompatible version 2, this NCCL build is compatible with 1",
        f'{WARNED}Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
        f"{WARNED}NET/IB : mlx5_0:1 Got non-fatal async event: port active(9)",
        f"{WARNED}NET/IB : Got async event : client reregistration",
        f"{JOB.head(0)}include/net.h:24 -> 2",
        f"{JOB.head(0)}misc/gdrwrap.cc:56 -> 3",
        f"{JOB.head(0)}enqueue.cc:12 -> 7",
        f"{JOB.head(0)}misc/socket.cc:47 -> 3",
        "Test NCCL was a success; 0 failures",
        "Exception ignored in: <function F at 0x7f>\nTraceback (most recent call last):\nTypeError\n",
        "mlx5_core 0000:5e:00.0 ens1f0np0: Link up",
        "kernel: mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged",
        "pcieport 0000:00:1b.0: AER: enabled with IRQ 122",
        f"{ROW} float     sum      -1    90.10   93.10  162.93      0    90.20   93.00  162.75    N/A",
        "     8388608    2097152   float     sum    90.10   93.10  162.93  2e-07    90.20   93.00  162.75  2e-07",
        f"{ROW} float     sum      -1    24410   93.10  162.93      0    90.20",
        "        2097152 1048576 float tensors of 12 34.00 5.00 6",
        "epoch 3: no NCCL error so far; Segmentation fault handler installed; Bus error counter: 0",
        "WARNING: batch size 64: CUDA out of memory. Retrying with 32",
        "NCCL failure detection enabled",
        "[1.2] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.95.05",
        "last CUDA error: no error",
        f"{WARNED}NET/IB : mlx5_0:1 Got async event : client reregistration",
        f"{WARNED}socketAcceptPeer: wrong magic 1 != 2",
        f"{JOB.head(0)}misc/socket.cc:806 -> 6\n{JOB.head(0)}ras/ras.cc:300 -> 6",
        f"{WARNED}Cuda failure 4 'driver shutting down'\n{JOB.head(0)}init.cc:12 -> 1",
        f"{WARNED}Could not find real path of /sys/class/net/eth0/device",
        "nodeA:100 NCCL DIAG [OK]   p2p: verified P2P access in both directions between every GPU pair (12 accesses)",
        "nodeA:100 NCCL DIAG [INFO] net bw: net devices are shared across ranks",
        "nodeA:100 NCCL DIAG NCCL diagnostics completed in 245.3 ms across 4 ranks",
        "nodeA: Exited with exit code 0",
        "NCCL_DEBUG=INFO mpirun all_reduce_perf",
    ],
)
def test_warnings_after_which_nccl_continues_are_no_failure(text: str) -> None:
    report = report_of(*JOB.logs(), text + "\n")
    assert (report.verdict, ids(report)) == (Verdict.PASS, [])


_SAID = (Path(__file__).parent / "endings.txt").read_text().splitlines()
"""Messages of launchers, schedulers, frameworks and drivers, each after its verdict."""


@pytest.mark.parametrize("line", [line.removeprefix("FAIL ") for line in _SAID if line.startswith("FAIL ")])
def test_a_process_that_ended_early_is_a_failure_in_every_wording(line: str) -> None:
    logs = [log[: log.rindex("Channel")] for log in JOB.logs()]
    report = report_of(*(f"{log.rpartition(chr(10))[0]}\n" for log in logs), f"{line}\n")
    assert report.verdict is Verdict.FAIL
    assert ids(report)[0] in ("program-failed", "nccl-call-failed", "collective-timed-out")


@pytest.mark.parametrize("line", [line.removeprefix("PASS ") for line in _SAID if line.startswith("PASS ")])
def test_a_process_that_ended_normally_is_no_failure(line: str) -> None:
    report = report_of(*JOB.logs(), f"{line}\n")
    assert (report.verdict, ids(report)) == (Verdict.PASS, [])


@pytest.mark.parametrize("line", [line.removeprefix("FAIL ") for line in _SAID if line.startswith("FAIL ")])
def test_an_ending_alone_is_a_failure_and_not_prose(line: str) -> None:
    assert failures_in(2 * f"{line}\n", has_rows=False)


_TOLD_BY_PEOPLE = (
    "Hi, our job was killed with exit code 1 on rank 3 before the update",
    "our job was killed with exit code 1",
    "Yesterday we saw the run before this one die: rank 2 died from signal 9",
    "I get this after I killed a hanging rank. Exited with exit code 137",
)


@pytest.mark.parametrize("line", _TOLD_BY_PEOPLE)
def test_prose_about_another_job_is_no_failure(line: str) -> None:
    report = report_of(*JOB.logs(), f"{line}\n")
    assert (report.verdict, ids(report)) == (Verdict.PASS, [])


@pytest.mark.parametrize("tag", ["", "[rank1]: "])
def test_the_last_error_of_pytorch_is_the_reason(tag: str) -> None:
    lines = (
        "ncclInvalidUsage: This usually reflects invalid usage.",
        "Last error:",
        "Duplicate GPU detected : rank 1 and 0",
    )
    text = "".join(f"{tag}{line}\n" for line in lines)
    interleaved = text.replace(f"{tag}Dupl", f"[rank0]: Last error:\n{tag}Dupl") if tag else text
    assert [ids(report_of(*JOB.logs(), each))[0] for each in (text, interleaved)] == 2 * ["nccl-duplicate-gpu"]


def test_an_error_in_front_of_a_line_of_nccl_counts() -> None:
    text = f"RuntimeError: NCCL error: unhandled cuda error {JOB.head(0)}cudaDriverVersion 12080\n"
    assert ids(report_of(*JOB.logs(), text))[0] == "nccl-cuda-call-failed"


def test_errors_while_communicators_are_closed_are_no_failure() -> None:
    ends = "".join(f"{JOB.head(rank)}{JOB.communicator(rank, 'Destroy COMPLETE')}\n" for rank in range(4))
    closed = f"{WARNED}[Service thread] Could not receive type from localRank 1, res=2, closed=0\n"
    closed += f"{JOB.head(0)}misc/socket.cc:749 -> 6\n{JOB.head(0)}proxy.cc:9 -> 2\n"
    assert report_of(*JOB.logs(), ends, closed).verdict is Verdict.PASS
    assert report_of(*JOB.logs(), closed).verdict is Verdict.FAIL


def test_errors_in_the_setup_of_collnet_are_no_failure() -> None:
    job = Job(version=(2, 12))
    calls = [f"{job.head(0)}{place}\n" for place in ("transport.cc:222 -> 2", "init.cc:765 -> 2")]
    collnet = f"{job.head(0)}include/coll_net.h:21 -> 3\n"
    instead = f"{WARNED}Cannot initialize CollNet, using point-to-point network instead\n"
    assert report_of(collnet, calls[0], instead, calls[1], *job.logs()).verdict is Verdict.PASS
    assert report_of(*calls, *job.logs()).verdict is Verdict.FAIL
    assert report_of(collnet, f"{WARNED}Cuda failure 700\n", *calls, *job.logs()).verdict is Verdict.FAIL
    assert report_of(collnet, f"{job.head(0)}proxy.cc:700 -> 3\n", *job.logs()).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["Sending process 7 closing signal SIGTERM", "failed (exitcode: -6) local_rank: 3 (pid: 9) of binary: /b/p"],
         "(exitcode: -6) local_rank: 3 (pid: 9)"),
        (["srun: Job step aborted: Waiting up to 32 seconds", "0: slurmstepd: error: *** STEP 7.1 ON n CANCELLED AT 9"],
         "STEP 7.1 ON n CANCELLED AT 9"),
        ([f"[launch.py:4:sigkill_handler] Killing subprocess {number}" for number in (7, 8)]
         + [f"[ERROR] [launch.py:4:sigkill_handler] ['python', '{'x' * 2000}', '--y'] exits with return code = -9"],
         "'--y'] exits with return code = -9"),
        (["=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   EXIT CODE: 9"], "EXIT CODE: 9"),
    ],
)  # fmt: skip
def test_the_most_specific_line_about_an_end_is_shown(lines: list[str], shown: str) -> None:
    report = report_of(*JOB.logs(), "".join(f"{line}\n" for line in lines))
    assert re.sub(r" \(\d+ lines like this\)", "", report.findings[0].seen) == shown
    assert report.verdict is Verdict.FAIL


def test_a_doubt_is_the_reason_if_the_job_failed() -> None:
    warning = FAILED["fabric-not-ready"][0]
    report = report_of(*JOB.logs(), f"{warning}\n{JOB.head(0)}graph/paths.cc:9 -> 1\n{JOB.head(0)}init.cc:7 -> 1\n")
    assert (report.verdict, ids(report)) == (Verdict.FAIL, ["fabric-not-ready"])


def test_an_unfinished_init_before_nccl_2_18_is_no_excerpt() -> None:
    job = Job(version=(2, 14))
    begin = "NCCL version 2.14.3+cuda11.7\n" + f"{job.head(0)}Bootstrap : Using eth0:10.0.0.1<0>\n"
    logs = ["".join(line for line in log.splitlines(keepends=True) if "COMPLETE" not in line) for log in job.logs()]
    report = report_of(begin, *logs)
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["nccl-init-unfinished"])


def test_a_communicator_without_connections_is_a_doubt_before_nccl_2_22() -> None:
    silent = Job(version=(2, 18), id="0xabc2", handle=0x9000, via=lambda *_: None)
    report = report_of(*(one + other for one, other in zip(Job(version=(2, 18)).logs(), silent.logs(), strict=True)))
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["ranks-silent"])


@pytest.mark.parametrize(
    ("kept", "verdict"),
    [
        pytest.param(("Init START", "nRanks"), Verdict.FAIL, id="nothing after it, on all ranks"),
        pytest.param(("Init START", "nRanks", " via "), Verdict.WARN, id="ranks were connected: the text may end here"),
    ],
)
def test_an_unfinished_init_is_named(kept: tuple[str, ...], verdict: Verdict) -> None:
    logs = [
        "".join(line for line in log.splitlines(keepends=True) if any(word in line for word in kept))
        for log in JOB.logs()
    ]
    report = report_of(*logs)
    assert (report.verdict, ids(report)[0]) == (verdict, "nccl-init-unfinished")
    assert report.findings[0].seen == "rank 0-3 of 4 began its initialization but did not finish it"


def test_an_init_that_waits_for_a_rank_without_a_log_is_a_doubt() -> None:
    started = [f"{JOB.head(rank)}{JOB.communicator(rank, 'Init START')}\n" for rank in range(4)]
    found = {len(logs): report_of(*logs).findings[0] for logs in (started, started[:3])}
    assert {ranks: (each.id, each.severity) for ranks, each in found.items()} == {
        4: ("nccl-init-unfinished", Verdict.FAIL),
        3: ("nccl-init-unfinished", Verdict.WARN),
    }


def test_warnings_that_gpubench_does_not_know_are_counted() -> None:
    first, *others = JOB.logs()
    warned = "".join(f"nodeA:100:100 [0] file.cc:1 NCCL WARN something new {each}\n" for each in "abc")
    (finding,) = report_of(first + warned, *others).findings
    assert finding.seen == "NCCL warns: something new a; and 2 more warnings"


def test_an_unfinished_init_of_another_communicator_is_a_doubt() -> None:
    other = Job(id="0xabc2", handle=0x9000)
    started = "".join(f"{other.head(rank)}{other.communicator(rank, 'Init START')}\n" for rank in range(4))
    report = report_of(*JOB.logs(), started)
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["nccl-init-unfinished"])


def on_racks(*racks: str, across: str = "NET/IB/0/GDRDMA") -> list[str]:
    said = "MNNVL busId 0x1a000 fabric UUID {} cliqueId 0x7ffe state 3 healthMask 0xaa"
    notes = {rank: (said.format(racks[rank // 2]),) for rank in range(4)}
    usual = via(across=across)
    sent_alone = across.startswith("P2P")

    def logged(source: int, destination: int, received: bool) -> str | None:
        return None if received and sent_alone else usual(source, destination, received)

    return Job(notes_of=notes, via=logged).logs()


@pytest.mark.parametrize(
    ("racks", "across", "unused"),
    [
        (("3143b15b.28cc9b54", "3143b15b.28cc9b54"), "NET/IB/0/GDRDMA", True),
        (("3143b15b.28cc9b54", "3143b15b.28cc9b54"), "P2P/MNNVL", False),
        (("3143b15b.28cc9b54", "9143b15b.28cc9b54"), "NET/IB/0/GDRDMA", False),
        (("0.0", "0.0"), "NET/IB/0/GDRDMA", False),
    ],
)
def test_hosts_of_one_rack_that_use_the_network_are_named(racks: tuple[str, str], across: str, unused: bool) -> None:
    """H100 hosts log cluster 0.0, and separate racks different ones (NVIDIA/nccl#1801). Health 0xaa is healthy."""
    report = report_of(*on_racks(*racks, across=across))
    assert ("mnnvl-unused" in ids(report)) is unused
    assert report.verdict is (Verdict.FAIL if unused else Verdict.PASS)
    if unused:
        assert "NET/IB/0/GDRDMA between hosts of one NVLink domain" in report.findings[0].seen
