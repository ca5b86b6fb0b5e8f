"""Texts as nvidia-smi, rocm-smi, ibstat, lspci, /sys and /proc print them, for four machines, and a machine that says
them. Written after the formats that their documentation and public bug reports show; no machine of the project's."""

from __future__ import annotations

from meshwright.detect.accelerators import QUERY
from meshwright.detect.ask import MachineAnswer

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(gpus, nics=(), *, underlined=False):
    """``nvidia-smi topo -m`` of these GPU rows and, for each NIC, its relation to every GPU."""
    heads = [f"GPU{i}" for i in range(len(gpus))] + [f"NIC{i}" for i in range(len(nics))]
    start, end = ("\x1b[4m", "\x1b[0m") if underlined else ("", "")
    lines = ["\t" + start + "\t".join([*heads, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + end]
    for i, row in enumerate(gpus):
        lines.append("\t".join([f"GPU{i}", *row, *(nic[1][i] for nic in nics), "0-51", "0", "\tN/A"]))
    for n, (_, near) in enumerate(nics):
        others = [" X " if m == n else "SYS" for m in range(len(nics))]
        lines.append("\t".join([f"NIC{n}", *near, *others, "", "", ""]))
    named = "".join(f"  NIC{n}: {name}\n" for n, (name, _) in enumerate(nics))
    return "\n".join(lines) + "\n" + LEGEND + (f"\nNIC Legend:\n\n{named}" if nics else "")


def all_pairs(count, link):
    return [[" X " if i == j else link for j in range(count)] for i in range(count)]


def ibstat(cards):
    """``ibstat`` of (card, state, rate, link layer)."""
    return "".join(
        f"CA '{card}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tFirmware version: 28.39.2048\n\tHardware version: 0\n"
        f"\tNode GUID: 0xa088c20300e3a1b2\n\tSystem image GUID: 0xa088c20300e3a1b2\n\tPort 1:\n\t\tState: {state}\n"
        f"\t\tPhysical state: {'LinkUp' if state == 'Active' else 'Disabled'}\n\t\tRate: {rate}\n\t\tBase lid: 17\n"
        f"\t\tLMC: 0\n\t\tSM lid: 1\n\t\tCapability mask: 0xa751e848\n\t\tPort GUID: 0xa088c20300e3a1b2\n"
        f"\t\tLink layer: {layer}\n"
        for card, state, rate, layer in cards
    )


def cpuinfo(sockets, cores, threads=2):
    rows, number = [], 0
    for socket in range(sockets):
        for core in range(cores):
            for _ in range(threads):
                rows.append(
                    f"processor\t: {number}\nphysical id\t: {socket}\ncore id\t\t: {core}\ncpu cores\t: {cores}\n"
                )
                number += 1
    return "\n".join(rows)


def meminfo(gib):
    return f"MemTotal:       {gib * 2**20} kB\nMemFree:        1024 kB\nMemAvailable:   2048 kB\n"


QUERY_COMMAND = f"nvidia-smi --query-gpu={','.join(QUERY)} --format=csv,noheader,nounits"
ROCM = "rocm-smi --showproductname --showmeminfo vram --json"
#: DGX H100: 8 GPUs behind NVSwitch, each with a ConnectX-7 on its PCIe switch, two more cards for storage.
COMPUTE = [f"mlx5_{i}" for i in range(8)]
DGX_H100 = {
    QUERY_COMMAND: "NVIDIA H100 80GB HBM3, 81559, 5, 16\n" * 8,
    "nvidia-smi topo -m": matrix(
        all_pairs(8, "NV18"),
        [(c, ["PXB" if i == n else "SYS" for i in range(8)]) for n, c in enumerate(COMPUTE)]
        + [("mlx5_8", ["NODE"] * 4 + ["SYS"] * 4), ("mlx5_9", ["SYS"] * 8)],
        underlined=True,
    ),
    "ibstat": ibstat([*((c, "Active", 400, "InfiniBand") for c in COMPUTE), ("mlx5_8", "Active", 400, "Ethernet"),
                      ("mlx5_9", "Down", 10, "Ethernet")]),
    "/proc/cpuinfo": cpuinfo(2, 56),
    "/proc/meminfo": meminfo(2048),
    "/sys/block": ["nvme0n1", "nvme1n1", "sda", "nvme0n1p1"],
    "/sys/block/nvme0n1/size": "7501476528\n",
    "/sys/block/nvme1n1/size": "7501476528\n",
}  # fmt: skip
#: Four A100 PCIe without bridges, two by two on a socket, one 25-gigabit port that is up.
A100_PCIE = {
    QUERY_COMMAND: "NVIDIA A100-PCIE-40GB, 40960, 4, 16\n" * 4,
    "nvidia-smi topo -m": matrix(
        [[" X ", "PHB", "SYS", "SYS"], ["PHB", " X ", "SYS", "SYS"], ["SYS", "SYS", " X ", "PHB"],
         ["SYS", "SYS", "PHB", " X "]]
    ),
    "/sys/class/net": ["eno1", "eno2", "lo", "docker0", "bond0"],
    "/sys/class/net/eno1": ["address", "device", "operstate", "speed"],
    "/sys/class/net/eno1/operstate": "up\n",
    "/sys/class/net/eno1/speed": "25000\n",
    "/sys/class/net/eno2": ["address", "device", "operstate", "speed"],
    "/sys/class/net/eno2/operstate": "down\n",
    "/sys/class/net/eno2/speed": "-1\n",
    "/sys/class/net/docker0": ["address", "operstate", "speed"],
    "/sys/class/net/docker0/operstate": "up\n",
    "/sys/class/net/docker0/speed": "10000\n",
    "/sys/class/net/bond0": ["address", "operstate", "speed"],
    "/sys/class/net/bond0/operstate": "up\n",
    "/sys/class/net/bond0/speed": "50000\n",
    "/proc/cpuinfo": cpuinfo(2, 16),
    "/proc/meminfo": meminfo(512),
}  # fmt: skip
#: A desk with two RTX 4090 on eight lanes each.
TWO_4090 = {
    QUERY_COMMAND: "NVIDIA GeForce RTX 4090, 24564, 4, 8\nNVIDIA GeForce RTX 4090, 24564, 4, 8\n",
    "nvidia-smi topo -m": matrix(all_pairs(2, "PHB")),
    "/proc/cpuinfo": cpuinfo(1, 16),
    "/proc/meminfo": meminfo(128),
}
CARD = (
    '"card{i}": {{"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "298876928", "Card Series": '
    '"AMD Instinct MI300X OAM", "Card Model": "0x74a1", "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]"}}'
)
#: Eight MI300X, every pair joined by XGMI, RoCE cards that only /sys knows.
MI300X = {
    ROCM: "WARNING: AMD GPU device(s) is/are in a low-power state.\n"
    + "{" + ", ".join(CARD.format(i=i) for i in range(8)) + "}\n",
    "rocm-smi --showtopotype": "\n".join(
        ["======================= ROCm System Management Interface =======================",
         "========================== Link Type between two GPUs ==========================",
         "       " + "".join(f"GPU{i}         " for i in range(8)),
         *(f"GPU{i}   " + "".join(f"{'0' if i == j else 'XGMI':<13}" for j in range(8)) for i in range(8)),
         "============================= End of ROCm SMI Log =============================="]
    ),
    "/sys/class/infiniband": [f"bnxt_re{i}" for i in range(8)],
    **{f"/sys/class/infiniband/bnxt_re{i}/ports": ["1"] for i in range(8)},
    **{f"/sys/class/infiniband/bnxt_re{i}/ports/1/{f}": t for i in range(8)
       for f, t in (("state", "4: ACTIVE\n"), ("rate", "400 Gb/sec (4X NDR)\n"), ("link_layer", "Ethernet\n"))},
    "/proc/cpuinfo": cpuinfo(2, 48),
    "/proc/meminfo": meminfo(2304),
}  # fmt: skip
LSPCI = """\
00:1f.0 ISA bridge: Intel Corporation Device 1b81 (rev 11)
17:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)
31:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)
b1:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)
ca:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)
03:00.0 VGA compatible controller: ASPEED Technology, Inc. ASPEED Graphics Family (rev 52)
"""


class Machine:
    """A machine that says these texts, and has nothing else."""

    def __init__(self, texts):
        self.texts = texts

    def run(self, *command):
        asked = " ".join(command)
        return (
            MachineAnswer(asked, self.texts[asked])
            if asked in self.texts
            else MachineAnswer(asked, missing="not installed")
        )

    def read(self, path):
        return (
            MachineAnswer(path, self.texts[path]) if path in self.texts else MachineAnswer(path, missing="No such file")
        )

    def names(self, path):
        return tuple(self.texts.get(path, ()))
