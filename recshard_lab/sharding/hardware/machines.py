"""Machines by name: each published figure, the share of it that programs reach, and the source of both.

Rates are per direction and per rank, in the units of `Topology` (bytes, bytes per millisecond). A manufacturer's GB is
1e9 bytes, so plans never assume more memory than exists. Unpublished figures come from `topology.DEVICE_DEFAULTS`. A
"host" is the ranks that NVLink connects: 8 GPUs of a server, 72 of a GB200 NVL72 rack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

GB, TB = 1e9, 1e12
GB_S = 1e6  # one GB/s in bytes per ms
GBIT_S = GB_S / 8
TFLOPS = 1e9  # in operations per ms
ASSUMED = "assumed"


@dataclass(frozen=True)
class Published:
    """One figure of a machine.

    Args:
        field: argument of `Topology`.
        peak: the published value, in the field's unit.
        source: publication and year; begins with "assumed" if unpublished.
        share: share of the peak that programs reach.
        share_source: source of the share; begins with "assumed" if not measured.

    >>> Published("intra_host_bw", 450e6, "data sheet, 2023", 0.8, "assumed").value
    360000000.0
    """

    field: str
    peak: float
    source: str
    share: float = 1.0
    share_source: str = ""

    @property
    def value(self) -> float:
        """The value for `Topology`: ``peak * share``; whole bytes for capacities."""
        used = self.peak * self.share
        return int(used) if self.field.endswith(("_cap", "_host")) else used


@dataclass(frozen=True)
class Machine:
    """A host of ranks.

    Args:
        name: name of the preset.
        about: description.
        ranks: ranks per host; a preset without a number is one host.
        figures: figures in display order.
        device: "cuda" or "cpu".
        one_host: whether any number of ranks runs on one host and shares its memory.
        gpu: the device's name in CUDA, for the preset "this"; empty if another machine has the same GPU.
    """

    name: str
    about: str
    ranks: int
    figures: tuple[Published, ...]
    device: str = "cuda"
    one_host: bool = False
    gpu: str = ""


_STREAM = (0.92, "Microsoft, ND GB200 v6 figures, 2025: 7.35 of 8 TB/s")
_STREAM_ASSUMED = (0.92, "assumed as measured on GB200 (Microsoft, 2025: 7.35 of 8 TB/s)")
_NVLINK = (0.82, "NCCL's maintainers, nccl-tests issue 212, 2024: 370 of 450 GB/s on H100")
_NVLINK_ASSUMED = (0.82, "assumed as on H100 (NCCL's maintainers, nccl-tests issue 212, 2024)")
_NDR = (0.97, "NCCL's maintainers, nccl-tests issue 267, 2025: 48 to 49 of 50 GB/s")
_NDR_ASSUMED = (0.97, "assumed as for ConnectX-7 (NCCL's maintainers, nccl-tests issue 267, 2025)")
_CLOUD = (0.8, "assumed: no all-to-all figure is published")
_LINK = (0.8, "assumed: protocol overhead of PCIe and of pinned copies")
_GEMM = (0.8, "assumed: large matrices; `matrix_half_batch` says what small ones reach")
_NCCL = "NCCL, latencies of its tuning model"
#: what no GPU's data sheet has: the host's time, messages, small kernels and matrices
GPU_FIGURES = (
    Published("launch_ms", 0.02, "NVIDIA, Nsight Systems on overhead and latency, 2020: about 20 us from torch, V100"),
    Published("host_ms", 0.04, "assumed: to enqueue a collective takes as long as two launches"),
    Published("sync_ms", 0.02, "assumed: as long as a launch"),
    Published("kernel_ms", 0.002, "assumed"),
    Published("intra_host_latency_ms", 0.0066, f"{_NCCL}, 2024: base of LL rings (nccl issue 1334)"),
    Published(
        "peer_ms",
        0.0006,
        f"{_NCCL}, 2024: NVLink (nccl issue 1334). Eight ranks: 10.8 us, measured 10.5 (DeepEP issue 303, 2025)",
    ),
    Published("gather_row_bytes", 64, "assumed: one memory access beside each row"),
    Published("matrix_half_batch", 1024, "assumed: fewer tiles of 128 rows do not fill the device"),
    Published(
        "straggler_sigma",
        0.02,
        "assumed: arXiv 2208.11035, 2022, finds a range of 8% among GPUs of one kind, taken as four deviations",
    ),
)
INFINIBAND = (
    Published("inter_host_latency_ms", 0.0066, f"{_NCCL}, 2024: base of LL rings (nccl issue 1334)"),
    Published(
        "inter_host_peer_ms",
        0.0027,
        f"{_NCCL}, 2022: network. 64 ranks, 8 MiB: 0.31 ms, measured 0.30 to 0.34 (nccl issue 1531, 2024)",
    ),
)
_EFA = (
    Published("inter_host_latency_ms", 0.05, "dstack pull request 3961, 2026: all-reduce of 8 bytes on two hosts, EFA"),
    Published(
        "inter_host_peer_ms",
        0.0066,
        "bottlerocket-kernel-kit pull request 313, 2025: all-to-all of 16 ranks on two hosts, EFA, 107 us",
    ),
)


def _gpu(
    sheet: str,
    memory_gb: float,
    memory_gb_s: float,
    nvlink_gb_s: float,
    tflops: float,
    link_gb_s: float,
    stream: tuple[float, str],
    tf32_tflops: float,
) -> tuple[Published, ...]:
    nvlink = _NVLINK if sheet.startswith("NVIDIA H100") else _NVLINK_ASSUMED
    return (
        Published("hbm_cap", memory_gb * GB, sheet),
        Published("hbm_mem_bw", memory_gb_s * GB_S, sheet, *stream),
        Published("cache_bw", 3 * memory_gb_s * GB_S, "assumed: three times the memory's, as in the defaults", *stream),
        Published("intra_host_bw", nvlink_gb_s * GB_S, f"{sheet}; both directions together are twice that", *nvlink),
        Published("ddr_mem_bw", link_gb_s * GB_S, f"{sheet}; from host memory, one direction", *_LINK),
        Published("flops_per_ms", tflops * TFLOPS, f"{sheet}; float32, torch's default", *_GEMM),
        Published("tf32_flops_per_ms", tf32_tflops * TFLOPS, f"{sheet}; TF32, dense", *_GEMM),
        *GPU_FIGURES,
    )


_V100 = _gpu("NVIDIA V100 32GB SXM data sheet, 2018", 32, 900, 150, 15.7, 16, _STREAM_ASSUMED, 15.7)
_CUBE_MESH = "assumed: as on H100, times 7/10, as three of the seven other GPUs are two NVLinks away"
_V100_CUBE_MESH = tuple(
    replace(each, share=0.57, share_source=_CUBE_MESH) if each.field == "intra_host_bw" else each for each in _V100
)
_A100_80 = _gpu("NVIDIA A100 80GB SXM data sheet, 2021", 80, 2039, 300, 19.5, 32, _STREAM_ASSUMED, 156)
_A100_40 = _gpu("NVIDIA A100 40GB SXM data sheet, 2020", 40, 1555, 300, 19.5, 32, _STREAM_ASSUMED, 156)
_H100 = _gpu("NVIDIA H100 SXM data sheet, 2023", 80, 3350, 450, 67, 64, _STREAM_ASSUMED, 494.5)
_H200 = _gpu("NVIDIA H200 SXM data sheet, 2024", 141, 4800, 450, 67, 64, _STREAM_ASSUMED, 494.5)
_GB200 = _gpu("NVIDIA GB200 NVL72 data sheet, 2024, a 72nd", 186, 8000, 900, 80, 225, _STREAM, 1250)


def _network(gbit_s: float, source: str, share: tuple[float, str]) -> Published:
    return Published("inter_host_bw", gbit_s * GBIT_S, source, *share)


def _host_memory(total: float, ranks: int, source: str) -> Published:
    return Published("ddr_cap", total / ranks, f"{source}, shared by {ranks}")


def _server(
    name: str,
    about: str,
    gpu: tuple[Published, ...],
    network: tuple[float, str, tuple[float, str]],
    memory: tuple[float, str],
    ranks: int = 8,
    named: str = "",
    messages: tuple[Published, ...] = INFINIBAND,
) -> Machine:
    shared = (_network(*network), *messages, _host_memory(memory[0], ranks, memory[1]))
    return Machine(name, about, ranks, (*gpu, *shared), gpu=named)


_GIB = 1024.0**3
_EC2 = "Amazon EC2 instance types, accelerated computing, 2025"
_GCE = "Google Compute Engine, GPU machine types and their bandwidth, 2025"
_AZURE = "Microsoft Azure VM sizes, ND family, 2025"

MACHINES: tuple[Machine, ...] = (
    _server(
        "v100",
        "DGX-1, 8 x V100 32GB",
        _V100_CUBE_MESH,
        (50, "NVIDIA DGX-1 white paper, 2017: four InfiniBand cards of 100 Gb/s for 8 GPUs", _NDR_ASSUMED),
        (512 * GB, "assumed: 512 GB"),
        named="V100-SXM2-32GB",
    ),
    _server(
        "dgx-2",
        "DGX-2, 16 x V100 32GB behind NVSwitch",
        _V100,
        (50, "NVIDIA DGX-2, 2018: eight InfiniBand cards of 100 Gb/s for 16 GPUs", _NDR_ASSUMED),
        (1.5 * TB, "NVIDIA DGX-2, 2018: 1.5 TB"),
        ranks=16,
        named="V100-SXM3-32GB",
    ),
    _server(
        "a100",
        "DGX A100, 8 x A100 80GB",
        _A100_80,
        (200, "NVIDIA DGX A100 data sheet, 2021: one ConnectX-6 of 200 Gb/s a GPU", _NDR_ASSUMED),
        (2 * TB, "NVIDIA DGX A100 data sheet, 2021: 2 TB"),
        named="A100-SXM4-80GB",
    ),
    _server(
        "a100-40gb",
        "DGX A100, 8 x A100 40GB",
        _A100_40,
        (200, "NVIDIA DGX A100 data sheet, 2020: one ConnectX-6 of 200 Gb/s a GPU", _NDR_ASSUMED),
        (1 * TB, "NVIDIA DGX A100 data sheet, 2020: 1 TB"),
        named="A100-SXM4-40GB",
    ),
    _server(
        "h100",
        "DGX H100, 8 x H100 SXM",
        _H100,
        (400, "NVIDIA DGX H100 data sheet, 2023: one ConnectX-7 of 400 Gb/s a GPU", _NDR),
        (2 * TB, "NVIDIA DGX H100 data sheet, 2023: 2 TB"),
        named="H100 80GB HBM3",
    ),
    _server(
        "h200",
        "DGX H200, 8 x H200 SXM",
        _H200,
        (400, "NVIDIA DGX H200 data sheet, 2024: one ConnectX-7 of 400 Gb/s a GPU", _NDR),
        (2 * TB, "NVIDIA DGX H200 data sheet, 2024: 2 TB"),
        named="H200",
    ),
    _server(
        "gb200nvl72",
        "GB200 NVL72 rack, 72 x B200 in one NVLink domain",
        _GB200,
        (400, "Microsoft Azure ND GB200 v6, 2025: one ConnectX-7 of 400 Gb/s a GPU", _NDR),
        (17 * TB, "NVIDIA GB200 NVL72 data sheet, 2024: 17 TB LPDDR5X"),
        ranks=72,
        named="GB200",
    ),
    _server(
        "aws-p4d",
        "AWS p4d.24xlarge, 8 x A100 40GB",
        _A100_40,
        (400 / 8, f"{_EC2}: 400 Gb/s of EFA for 8 GPUs", _CLOUD),
        (1152 * _GIB, f"{_EC2}: 1,152 GiB"),
        messages=_EFA,
    ),
    _server(
        "aws-p4de",
        "AWS p4de.24xlarge, 8 x A100 80GB",
        _A100_80,
        (400 / 8, f"{_EC2}: 400 Gb/s of EFA for 8 GPUs", _CLOUD),
        (1152 * _GIB, f"{_EC2}: 1,152 GiB"),
        messages=_EFA,
    ),
    _server(
        "aws-p5",
        "AWS p5.48xlarge, 8 x H100",
        _H100,
        (3200 / 8, f"{_EC2}: 3,200 Gb/s of EFA for 8 GPUs", _CLOUD),
        (2048 * _GIB, f"{_EC2}: 2,048 GiB"),
        messages=_EFA,
    ),
    _server(
        "aws-p5en",
        "AWS p5en.48xlarge, 8 x H200",
        _H200,
        (3200 / 8, f"{_EC2}: 3,200 Gb/s of EFA for 8 GPUs", _CLOUD),
        (2048 * _GIB, f"{_EC2}: 2,048 GiB"),
        messages=_EFA,
    ),
    _server(
        "gcp-a2-ultra",
        "Google a2-ultragpu-8g, 8 x A100 80GB",
        _A100_80,
        (100 / 8, f"{_GCE}: 100 Gb/s for 8 GPUs", _CLOUD),
        (1360 * GB, f"{_GCE}: 1,360 GB"),
    ),
    _server(
        "gcp-a3-high",
        "Google a3-highgpu-8g, 8 x H100",
        _H100,
        (800 / 8, f"{_GCE}: 1,000 Gb/s, of which four cards of 200 Gb/s are the GPUs'", _CLOUD),
        (1872 * GB, f"{_GCE}: 1,872 GB"),
    ),
    _server(
        "gcp-a3-mega",
        "Google a3-megagpu-8g, 8 x H100",
        _H100,
        (1600 / 8, f"{_GCE}: 1,800 Gb/s, of which eight cards of 200 Gb/s are the GPUs'", _CLOUD),
        (1872 * GB, f"{_GCE}: 1,872 GB"),
    ),
    _server(
        "gcp-a3-ultra",
        "Google a3-ultragpu-8g, 8 x H200",
        _H200,
        (3200 / 8, f"{_GCE}: eight ConnectX-7 of 400 Gb/s", _NDR_ASSUMED),
        (2952 * GB, f"{_GCE}: 2,952 GB"),
    ),
    _server(
        "azure-nd-a100-v4",
        "Azure ND96asr_v4, 8 x A100 40GB",
        _A100_40,
        (200, f"{_AZURE}: 200 Gb/s of HDR InfiniBand a GPU", _NDR_ASSUMED),
        (900 * _GIB, f"{_AZURE}: 900 GiB"),
    ),
    _server(
        "azure-nd-h100-v5",
        "Azure ND96isr_H100_v5, 8 x H100",
        _H100,
        (400, f"{_AZURE}: 400 Gb/s of ConnectX-7 InfiniBand a GPU", _NDR),
        (1900 * _GIB, f"{_AZURE}: 1,900 GiB"),
    ),
    _server(
        "azure-nd-h200-v5",
        "Azure ND96isr_H200_v5, 8 x H200",
        _H200,
        (400, f"{_AZURE}: 400 Gb/s of ConnectX-7 InfiniBand a GPU", _NDR),
        (1850 * _GIB, f"{_AZURE}: 1,850 GiB"),
    ),
    Machine(
        "cpu-laptop",
        "a laptop without a GPU; its speeds are the CPU defaults, measured with one thread a rank",
        4,
        (
            Published("ddr_cap", 16 * GB, "assumed: 16 GB, shared by the ranks"),
            Published("cores_per_host", 8, "assumed: 8 cores"),
        ),
        device="cpu",
        one_host=True,
    ),
)

ALIASES: dict[str, str] = {
    "dgx-1": "v100",
    "dgx-a100": "a100",
    "a100-80gb": "a100",
    "dgx-h100": "h100",
    "dgx-h200": "h200",
    "p4d": "aws-p4d",
    "p4d.24xlarge": "aws-p4d",
    "p4de": "aws-p4de",
    "p4de.24xlarge": "aws-p4de",
    "p5": "aws-p5",
    "p5.48xlarge": "aws-p5",
    "p5en": "aws-p5en",
    "p5en.48xlarge": "aws-p5en",
    "a2-ultragpu-8g": "gcp-a2-ultra",
    "a3-highgpu-8g": "gcp-a3-high",
    "a3-megagpu-8g": "gcp-a3-mega",
    "a3-ultragpu-8g": "gcp-a3-ultra",
    "nd-h100-v5": "azure-nd-h100-v5",
    "nd-h200-v5": "azure-nd-h200-v5",
}


def machine_of_gpu(name: str, machines: Sequence[Machine] = MACHINES) -> Machine | None:
    """The machine with this GPU, by the GPU's name in CUDA; None if not listed.

    >>> machine_of_gpu("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    return next((machine for machine in machines if machine.gpu and name.endswith(machine.gpu)), None)
