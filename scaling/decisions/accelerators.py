"""Accelerators by name, and budgets on them in FLOPs, device-hours, dollars or days on a number of devices.

Peaks are the vendors' dense figures, FLOP/s of one device with fp32 sums; if a datasheet states the rate of sparse
matrices, the peak is half of that rate. Memory is in bytes, 1e9 to the GB. Bandwidth is that of the memory, from the same sources.

| name | bf16, fp8 (TFLOP/s) | memory | bandwidth (TB/s) | source |
| --- | --- | --- | --- | --- |
| A100 40GB, A100 80GB | 312 | 40, 80 GB | 1.555, 2.039 (SXM) | NVIDIA A100 datasheet, June 2021 |
| H100 SXM | 989.5, 1979 | 80 GB | 3.35 | NVIDIA H100 datasheet, 2023 (1,979 and 3,958 sparse) |
| H100 PCIe | 756.5, 1513 | 80 GB | 2 | NVIDIA H100 datasheet, 2023 (1,513 and 3,026 sparse) |
| H200 | 989.5, 1979 | 141 GB | 4.8 | NVIDIA H200 datasheet, 2024, the SXM part (1,979 and 3,958 sparse) |
| B200 | 2250, 4500 | 180 GB | 8 | NVIDIA HGX B200 and DGX B200 datasheets, 2024 (4.5 and 9 PFLOP/s sparse; 1,440 GB for eight) |
| GB200 | 2500, 5000 | 186 GB | 8 | NVIDIA Blackwell datasheet, 2025, one of the two GPUs (5 and 10 PFLOP/s sparse) |
| L40S | 362.05, 733 | 48 GB | 0.864 | NVIDIA L40S datasheet, 2023 |
| MI300X | 1307.4, 2614.9 | 192 GB | 5.3 | AMD Instinct MI300X data sheet, December 2023 |
| MI325X | 1307.4, 2614.9 | 256 GB | 6 | AMD Instinct MI325X data sheet, October 2024 |
| Trainium2 | 667, 1299 | 103 GB | 2.9 | AWS Neuron documentation, "Trainium2 Architecture" (96 GiB), read November 2026 |
| TPU v5e | 197 | 16 GB | 0.819 | Google Cloud, "TPU v5e", system architecture, read November 2026 |
| TPU v5p | 459 | 95 GB | 2.765 | Google Cloud, "TPU v5p", system architecture, read November 2026 |
| TPU v6e | 918 | 32 GB | 1.638 | Google Cloud, "TPU v6e", system architecture, read November 2026 |

The share of the peak that training reaches (MFU, Chowdhery et al. 2204.02311, app. B) is assumed to be 40 %: Llama 3 405B
reached 38–43 % on H100s (Grattafiori et al. 2407.21783, table 4), PaLM 46 % on TPU v4. **Prices are assumed**: round dollars
per device-hour, plausible for a long rental in 2026, but no vendor's quotes. Set your prices with `replace`,

    mine = dataclasses.replace(accelerator("H100 SXM"), dollars_per_hour=1.85, mfu=0.47)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from scaling.checks import positive
from scaling.presentation import Result, lines

ASSUMED_MFU = 0.40
"""Share of the peak of the training precision; see the head of this file."""
SECONDS_PER_HOUR, HOURS_PER_DAY = 3600.0, 24.0


def require_positive(name: str, value: float) -> float:
    """Return the value if it is finite and above 0; raise ValueError if the value is not finite and above 0, or is no number."""
    positive(name, value)
    return value


@dataclass(frozen=True, kw_only=True)
class Accelerator(Result):
    """One device for training or serving.

    Attributes:
        peak_flops: dense FLOP/s by precision.
        dollars_per_hour: price of one device; assumed for `ACCELERATORS`.
        mfu: share of the peak that training reaches, above 0, at most 1.
        precision: training precision, a key of `peak_flops`.
        memory_bandwidth: bytes that the device reads from its memory per second; None if not known.

    Raises:
        ValueError: a number breaks its rule, or the precision has no peak.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    dollars_per_hour: float
    mfu: float = ASSUMED_MFU
    precision: str = "bf16"
    memory_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ValueError(f"precision of {self.name} must be one of {known}, got {self.precision!r}")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu must be above 0 and at most 1, got {self.mfu!r}")
        peaks = {f"peak_flops[{precision!r}]": peak for precision, peak in self.peak_flops.items()}
        for name, value in {
            "memory_bytes": self.memory_bytes,
            "dollars_per_hour": self.dollars_per_hour,
            "memory_bandwidth": self.memory_bandwidth,
            **peaks,
        }.items():
            if value is not None:
                require_positive(name, value)

    @property
    def flops_per_second(self) -> float:
        """FLOP/s that one device is assumed to reach: peak × MFU."""
        return self.peak_flops[self.precision] * self.mfu

    @property
    def dollars_per_flop(self) -> float:
        """Price of one FLOP at this MFU."""
        return self.dollars_per_hour / (self.flops_per_second * SECONDS_PER_HOUR)

    def read_seconds(self, n_bytes: float, n_devices: int = 1) -> float:
        """Time in which the devices read these bytes from their memories, an even share each, at the full bandwidth.

        Raises:
            ValueError: the bandwidth is not known.
        """
        if self.memory_bandwidth is None:
            raise ValueError(f"memory_bandwidth of {self.name} must be given for a reading time, got None")
        return n_bytes / (self.memory_bandwidth * n_devices)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.mfu:.0%} of {self.peak_flops[self.precision] / 1e12:.5g} TFLOP/s ({self.precision}), "
            f"{self.memory_bytes / 1e9:.4g} GB, ${self.dollars_per_hour:.2f} an hour"
        )


def _known(
    name: str, bf16: float, memory: float, bandwidth: float, dollars: float, fp8: float | None = None
) -> Accelerator:
    peaks = {"bf16": bf16 * 1e12} | ({} if fp8 is None else {"fp8": fp8 * 1e12})
    return Accelerator(
        name=name,
        peak_flops=peaks,
        memory_bytes=memory * 1e9,
        dollars_per_hour=dollars,
        memory_bandwidth=bandwidth * 1e12,
    )


ACCELERATORS: Mapping[str, Accelerator] = {
    known.name: known
    for known in (
        _known("A100 40GB", 312, 40, 1.555, 1.20),
        _known("A100 80GB", 312, 80, 2.039, 1.50),
        _known("H100 SXM", 989.5, 80, 3.35, 2.50, fp8=1979),
        _known("H100 PCIe", 756.5, 80, 2, 2.00, fp8=1513),
        _known("H200", 989.5, 141, 4.8, 3.00, fp8=1979),
        _known("B200", 2250, 180, 8, 4.50, fp8=4500),
        _known("GB200", 2500, 186, 8, 5.00, fp8=5000),
        _known("L40S", 362.05, 48, 0.864, 0.90, fp8=733),
        _known("MI300X", 1307.4, 192, 5.3, 2.50, fp8=2614.9),
        _known("MI325X", 1307.4, 256, 6, 2.75, fp8=2614.9),
        _known("Trainium2", 667, 103, 2.9, 1.50, fp8=1299),
        _known("TPU v5e", 197, 16, 0.819, 0.80),
        _known("TPU v5p", 459, 95, 2.765, 2.50),
        _known("TPU v6e", 918, 32, 1.638, 1.80),
    )
}
"""Accelerators by name; the head of this file has sources and assumptions."""


def accelerator(device: Accelerator | str) -> Accelerator:
    """Return the accelerator of this name, or the one given; raise ValueError, with similar names, if the name is unknown."""
    if isinstance(device, Accelerator):
        return device
    if device not in ACCELERATORS:
        lower, wanted = {known.lower(): known for known in ACCELERATORS}, str(device).lower()
        meant = [known for known in lower if known.startswith(wanted)] or get_close_matches(wanted, lower)
        suggestion = f": did you mean {' or '.join(lower[known] for known in meant)}?" if meant else ""
        raise ValueError(f"accelerator must be one of {', '.join(ACCELERATORS)}, got {device!r}{suggestion}")
    return ACCELERATORS[device]


@dataclass(frozen=True, kw_only=True)
class Budget(Result):
    """Compute to spend and its devices: `Budget(compute_flops=1e24)`, or from hours, dollars or a deadline.

    Attributes:
        accelerator: the device, also by its name; hours and dollars are known only with an accelerator.
        n_devices: number of devices; days are known only with this number.
        terms: the budget as the user stated it.

    Raises:
        ValueError: a number is not finite and above 0, `n_devices` is not a whole number, or the accelerator is unknown.
    """

    compute_flops: float
    accelerator: Accelerator | None = None
    n_devices: int | None = None
    terms: str = ""

    def __post_init__(self) -> None:
        if self.n_devices is not None and not (self.n_devices >= 1 and float(self.n_devices).is_integer()):
            raise ValueError(f"n_devices must be a whole number, at least 1, got {self.n_devices!r}")
        require_positive("compute_flops", self.compute_flops)
        if self.accelerator is not None:
            object.__setattr__(self, "accelerator", accelerator(self.accelerator))

    @classmethod
    def of_gpu_hours(cls, hours: float, device: Accelerator | str, n_devices: int | None = None) -> "Budget":
        """Budget of device-hours, for any number of devices."""
        device, hours = accelerator(device), require_positive("hours", hours)
        flops = hours * SECONDS_PER_HOUR * device.flops_per_second
        return cls(
            compute_flops=flops,
            accelerator=device,
            n_devices=n_devices,
            terms=f"{hours:,.10g} device-hours of {device}",
        )

    @classmethod
    def of_dollars(cls, dollars: float, device: Accelerator | str, n_devices: int | None = None) -> "Budget":
        """Budget of dollars at the device's price."""
        device, dollars = accelerator(device), require_positive("dollars", dollars)
        flops = dollars / device.dollars_per_flop
        return cls(compute_flops=flops, accelerator=device, n_devices=n_devices, terms=f"${dollars:,.10g} for {device}")

    @classmethod
    def of_days(cls, days: float, device: Accelerator | str, n_devices: int) -> "Budget":
        """Deadline: all of `n_devices` for a number of days."""
        device, days = accelerator(device), require_positive("days", days)
        flops = days * HOURS_PER_DAY * SECONDS_PER_HOUR * n_devices * device.flops_per_second
        terms = f"{days:.6g} days of {n_devices:,} × {device}"
        return cls(compute_flops=flops, accelerator=device, n_devices=n_devices, terms=terms)

    @property
    def gpu_hours(self) -> float | None:
        """Device-hours, None without an accelerator."""
        if self.accelerator is None:
            return None
        return self.compute_flops / (self.accelerator.flops_per_second * SECONDS_PER_HOUR)

    @property
    def dollars(self) -> float | None:
        """Cost, None without an accelerator."""
        return None if self.accelerator is None else self.compute_flops * self.accelerator.dollars_per_flop

    @property
    def days(self) -> float | None:
        """Wall time on the devices, None without their number."""
        hours = self.gpu_hours
        return None if hours is None or self.n_devices is None else hours / self.n_devices / HOURS_PER_DAY

    def __str__(self) -> str:
        return lines({"budget": self.worth, **({"stated as": self.terms} if self.terms else {})})

    @property
    def worth(self) -> str:
        """FLOPs, device-hours, dollars and days, on one line."""
        parts = [f"{self.compute_flops:.4g} FLOPs"]
        if self.gpu_hours is not None and self.dollars is not None:
            parts += [f"{self.gpu_hours:,.4g} device-hours", f"${self.dollars:,.0f}"]
        if self.days is not None:
            parts.append(f"{self.days:.3g} days on {self.n_devices:,} devices")
        return ", ".join(parts)
