"""What `overlap.py` measures: modes, shapes, and where the calibration of each begins. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from compare_setting import Size

from phalanx.lab.gpu import PROVEN

PAIRED = "oases, pairs"
CALIBRATED = "oases"  # the mode whose compute : communication is brought to AIM
BASE, UNSPLIT = "default_checkpoint", "optim_comm_checkpoint"  # what it is compared with
MODES = {  # and what a plan says for them
    **{mode: f"overlap={mode}" for mode in (CALIBRATED, BASE, UNSPLIT, "overlap_checkpoint", "none", "halves")},
    "none, pairs": "pairs=yes",
    PAIRED: "overlap=oases,pairs=yes",
}
# A forward has half of the communication and a quarter of the computation (the backward computes it again, and two
# gradients), so ranks wait for the link in the forward and the link for ranks in the backward. Simulated, without any
# loss, `oases` comes to 78 % of the ideal at 1 : 1 and to 86 to 88 % at both ends of 0.8 to 1.25. At this end
# communication is the longer part, and the processor time that it takes itself delays nothing.
AIM = 0.84


@dataclass(frozen=True)
class Case:
    """start: where the calibration begins: the link's bits per second, or the percent of the GPU that a rank gets."""

    name: str
    size: Size
    start: int


@dataclass(frozen=True)
class Kind:
    """Ranks of one sort. accepted: compute : communication at which a case is measured, else it is calibrated again.
    steps: per measurement. variables: of each rank."""

    device: str
    dtype: str
    cases: tuple[Case, ...]
    accepted: tuple[float, float]
    steps: int
    variables: tuple[str, ...] = ()

    def lab(self, amount: int) -> str:
        if self.device == "cpu":
            return f"nodes=2,ranks_per_node=1,link={amount // 1000}kbit,device=cpu:1thread"
        return f"ranks=2,gpu_share={amount}%"

    def next_amount(self, amount: int, ratio: float) -> int:
        """A faster link shortens communication, a larger share of the GPU shortens computation."""
        if self.device == "cpu":
            return round(amount * AIM / ratio)
        return min(PROVEN, key=lambda share: abs(share - amount * ratio / AIM))


CPU = Kind(
    "cpu", "float32",
    (
        Case("H 512", Size(layers=12, width=512, vocabulary=1024, samples=8, tokens=96), 160_000_000),
        Case("H 1024", Size(layers=8, width=1024, vocabulary=1024, samples=8, tokens=48), 78_000_000),
    ),
    accepted=(0.8, 0.9), steps=1,
)  # fmt: skip
GPU = Kind(
    "cuda", "bfloat16",
    (
        Case("H 2048", Size(layers=8, width=2048, vocabulary=2048, samples=4, tokens=1024), 20),
        Case("H 4096", Size(layers=4, width=4096, vocabulary=2048, samples=4, tokens=1024), 50),
        Case("H 8192", Size(layers=2, width=8192, vocabulary=2048, samples=4, tokens=1024), 100),
    ),
    accepted=(0.8, 1.25), steps=1,
    variables=(
        "NCCL_SOCKET_NTHREADS=2", "NCCL_NSOCKS_PERTHREAD=4", "NCCL_MIN_NCHANNELS=4", "NCCL_MAX_NCHANNELS=4",
        "NCCL_BUFFSIZE=8388608",
    ),
)  # fmt: skip
