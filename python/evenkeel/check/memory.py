"""The tensors of a case: bytes between guards, at the alignment and with the strides that it asks for.

They are made on the host. For a GPU every call gets a copy of all bytes, guards included, and its results
are copied back, so that the same comparison serves both.
"""

from typing import ClassVar

import numpy as np

from evenkeel import _abi

GUARD, GUARD_BYTE, POISON = 192, 0xA5, 0xFF  # poison is a NaN in every type
ALIGNMENT = 64
STORED = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16}
STORED |= dict.fromkeys(("e4m3", "e5m2"), np.uint8) | {"i8": np.int8}
# Bits of the fraction, and exponents of the smallest and of the largest normal number.
FORMATS = {"f16": (10, -14, 15), "bf16": (7, -126, 127), "f32": (23, -126, 127)}
FORMATS |= {"e4m3": (3, -6, 8), "e5m2": (2, -14, 15)}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "i8": 127.0}  # quantized values saturate there


def round_to(values, dtype):
    """float64 values rounded to the numbers of a type, to nearest even, infinities included."""
    if dtype == "f64":
        return values
    if dtype == "i8":
        return np.clip(np.rint(np.nan_to_num(values, nan=0.0)), -128, 127)
    if dtype in LARGEST:
        limit = LARGEST[dtype]
        lost = np.nan if dtype == "e4m3" else values
        values = np.where(np.isfinite(values), np.clip(values, -limit, limit), lost)
    bits, smallest, largest = FORMATS[dtype]
    _, exponent = np.frexp(values)
    step = np.ldexp(1.0, np.maximum(exponent - 1, smallest) - bits)
    rounded = np.where(np.isfinite(values), np.rint(values / step) * step, values)
    limit = np.ldexp(2.0 - np.ldexp(1.0, -bits), largest)
    return np.where(np.abs(rounded) > limit, np.copysign(np.inf, rounded), rounded)


def encode(values, dtype):
    rounded = round_to(np.asarray(values, np.float64), dtype)
    if dtype != "bf16":
        return rounded.astype(STORED[dtype])
    return (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def decode(stored, dtype):
    if dtype in ("e4m3", "e5m2"):
        bits, smallest, _ = FORMATS[dtype]
        codes = stored.astype(np.int64)
        above, fraction = (codes & 0x7F) >> bits, codes & ((1 << bits) - 1)
        fraction += (above > 0) << bits
        values = np.ldexp(fraction.astype(np.float64), np.maximum(above, 1) - 1 + smallest - bits)
        last = 0x7F if dtype == "e4m3" else 0x7C  # from there on no number
        rest = np.where((codes & 0x7F) == 0x7C, np.inf, np.nan)
        values = np.where((codes & 0x7F) >= last, rest, values)
        return np.where(codes & 0x80, -values, values)
    if dtype == "bf16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def offsets(case, name):
    """Where the elements of a tensor are, as (units, elements of a unit), channels before pixels."""
    row, outer = case[f"{name}_row_stride"], case[f"{name}_outer_stride"]
    if not case.is_group:
        inner = case["inner_rows"] or max(case["rows"], 1)
        row = row or case["cols"]
        outer = outer or inner * row
        rows = np.arange(case["rows"])
        return (rows // inner * outer + rows % inner * row)[:, None] + np.arange(case["cols"])
    samples, channels, spatial = case["samples"], case["channels"], case["spatial"]
    nhwc = case["layout"] == "nhwc"
    row = row or (channels if nhwc else spatial)
    outer = outer or row * (spatial if nhwc else channels)
    channel_step, pixel_step = (1, row) if nhwc else (row, 1)
    places = (
        np.arange(samples)[:, None, None] * outer
        + np.arange(channels)[:, None] * channel_step
        + np.arange(spatial) * pixel_step
    )
    return places.reshape(case.unit_count, case.unit_size)


def sample_offsets(case, name):
    """The same of a row for each sample."""
    stride = case[f"{name}_stride"] or case["cols"]
    return np.arange(case["samples"])[:, None] * stride + np.arange(case["cols"])


class Buffer:
    """Elements of one type at `places` within guarded bytes, poisoned until they are written."""

    def __init__(self, places, dtype, misalign):
        self.places, self.dtype = places, dtype
        count = int(places.max()) + 1 if places.size else 0
        size = count * np.dtype(STORED[dtype]).itemsize
        self.begin = GUARD + misalign
        memory = np.empty(self.begin + size + GUARD + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.bytes = memory[start : start + self.begin + size + GUARD]
        self.inside = slice(self.begin, self.begin + size)
        self.poison()

    def poison(self):
        self.bytes[:] = GUARD_BYTE
        self.bytes[self.inside] = POISON

    def elements(self):
        """A copy: at an odd address there is no view of wider types."""
        return np.frombuffer(self.bytes[self.inside].tobytes(), STORED[self.dtype]).copy()

    def write(self, values):
        stored = self.elements()
        stored[self.places] = encode(values, self.dtype)
        self.bytes[self.inside] = np.frombuffer(stored.tobytes(), np.uint8)

    def read(self):
        return decode(self.elements()[self.places], self.dtype)

    def damage(self):
        """What was written that is not an element, or None."""
        guards = self.bytes[: self.begin], self.bytes[self.inside.stop :]
        if any((guard != GUARD_BYTE).any() for guard in guards):
            return "the guards around it were written to"
        width = np.dtype(STORED[self.dtype]).itemsize
        gaps = self.bytes[self.inside].reshape(-1, width).copy()
        gaps[self.places.reshape(-1)] = POISON
        return "the gaps between its rows were written to" if (gaps != POISON).any() else None


class Host:
    """Calls read and write the buffers themselves."""

    where: ClassVar[dict] = {}

    def address(self, buffer):
        return buffer.bytes.ctypes.data + buffer.begin

    def scratch(self, size):
        memory = np.full(size + ALIGNMENT, POISON, np.uint8)
        return memory.ctypes.data, memory

    def finish(self):
        pass


class Device:
    """Calls read and write copies on a device of torch's."""

    def __init__(self, device):
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.copies = {}
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            kind, index = _abi.DEVICES["cuda"], stream.device_index
            self.where = {"device": kind, "device_index": index, "stream": stream.cuda_stream}
        else:
            self.where = {}

    def address(self, buffer):
        if id(buffer) not in self.copies:
            copy = self.torch.from_numpy(buffer.bytes).to(self.device, copy=True)
            self.copies[id(buffer)] = buffer, copy
        return self.copies[id(buffer)][1].data_ptr() + buffer.begin

    def scratch(self, size):
        memory = self.torch.full(
            (max(size, 1),), POISON, dtype=self.torch.uint8, device=self.device
        )
        return memory.data_ptr(), memory

    def finish(self):
        """Brings all bytes back; this also waits for the calls."""
        for buffer, copy in self.copies.values():
            buffer.bytes[:] = copy.cpu().numpy()
        self.copies = {}
