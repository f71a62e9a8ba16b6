"""What the demo's models learn: text that ships with the project, and pictures made up from a seed.

Both give batches by number, so that two runs see the same ones whatever happens between them. All of it
lives on the device: nothing is loaded or moved while steps are timed.
"""

import pathlib

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = "README.md CONTRIBUTING.md bindings docs examples include python src".split()
SUFFIXES = (".c", ".cc", ".cu", ".cuh", ".h", ".hpp", ".md", ".py")
BYTES = 256  # a token is a byte


def text_files():
    """The project's sources and documents, in an order that depends on their names only."""
    found = [ROOT / name for name in SOURCES]
    found += [path for folder in found if folder.is_dir() for path in folder.rglob("*")]
    files = sorted(path for path in found if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise FileNotFoundError(f"no text to learn: {ROOT} holds none of {', '.join(SOURCES)}")
    return files


class Text:
    """Pieces of the project's text, `batch` at a time."""

    classes = BYTES

    def __init__(self, batch, context, steps, seed, device):
        files = text_files()
        content = b"\n".join(path.read_bytes() for path in files)
        self.about = (
            f"{len(files)} files of the project's own sources and documents, "
            f"{len(content) / 1e6:.1f} MB, read as bytes"
        )
        self.tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        generator = torch.Generator().manual_seed(seed)
        begins = torch.randint(len(content) - context + 1, (steps, batch, 1), generator=generator)
        self.places = (begins + torch.arange(context)).to(device)

    def batch(self, step):
        return (self.tokens[self.places[step]].long(),)


class Pictures:
    """Pictures of ten patterns, shifted a little and buried in noise, and which pattern it is.

    One label in ten is drawn anew, so that no model gets to a loss of zero. Channels-last, as convolutions
    like it best on a GPU.
    """

    classes = 10
    coarse = 8  # the side of a pattern, before it is enlarged to a picture
    noise = 1.0
    wrong_labels = 0.1

    def __init__(self, batch, size, steps, seed, device):
        self.about = f"pictures of {size} x {size} pixels: {self.classes} patterns made up from the seed, in noise"
        self.seed, self.shape, self.device = seed, (batch, 3, size, size), device
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.randn(self.classes, 3, self.coarse, self.coarse, generator=generator)
        self.patterns = F.interpolate(patterns, size=(size, size), mode="bilinear").to(device)
        shown, other = torch.randint(self.classes, (2, steps, batch), generator=generator)
        keeps = torch.rand(steps, batch, generator=generator) >= self.wrong_labels
        self.shown, self.labels = shown.to(device), torch.where(keeps, shown, other).to(device)
        self.shifts = torch.randint(size // 4 + 1, (steps, 2), generator=generator).tolist()

    def batch(self, step):
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + step)
        noise = torch.randn(self.shape, generator=generator, device=self.device)
        clean = self.patterns[self.shown[step]].roll(self.shifts[step], dims=(2, 3))
        pictures = (clean + self.noise * noise).contiguous(memory_format=torch.channels_last)
        return pictures, self.labels[step]
