"""DDP against FSDP on a small convolutional net: the same numbers, other memory.

    torchrun --standalone --nproc_per_node 2 examples/digits.py
    torchrun --standalone --nproc_per_node 2 examples/digits.py --engines fsdp2 --mnist FOLDER

Trains on scikit-learn's 1,797 digits of 8 x 8 pixels (part of that package), or on the original
MNIST files (train-images-idx3-ubyte and the other three, also .gz) in FOLDER. It shows that the
engines of t5_fsdp take any module: the net names no blocks, so FSDP shards it by size.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World, enter_world, leave, read_launch
from t5_fsdp.errors import EXIT_USER_ERROR, UserError
from t5_fsdp.model.build import unique_state_dict
from t5_fsdp.parallel.common import local_part
from t5_fsdp.parallel.engine import Engine, check_optimizer, parallelize

GLOBAL_BATCH = 64
Digits = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class ConvNet(nn.Module):
    """Two convolutions and two linear layers for ten classes."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2),
        )  # fmt: skip
        self.hidden = nn.Linear(64 * (pixels // 2) ** 2, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 10] of images [batch, 1, pixels, pixels]."""
        return self.head(self.hidden(self.features(images).flatten(1)).relu())


def load_digits(mnist: Path | None) -> Digits:
    """Training images [n, 1, pixels, pixels] in 0 to 1 and labels [n], then those to test with."""
    if mnist is not None:
        names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                 "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # fmt: skip
        images, labels, test_images, test_labels = (read_idx(mnist, name) for name in names)
        return (
            images[:, None] / 255.0,
            labels.long(),
            test_images[:, None] / 255.0,
            test_labels.long(),
        )
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(digits.target)
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """One of MNIST's files: two zero bytes, type 8 (bytes), the number of sizes, the sizes.

    Raises:
        UserError: it is missing, or of another format.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise UserError(f"--mnist: {folder} has no {name} or {name}.gz; give MNIST's folder")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        sizes = np.frombuffer(content, ">u4", count=content[3], offset=4).tolist()
        if content[:3] != b"\x00\x00\x08":
            raise ValueError("the first bytes are others")
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UserError(f"--mnist: {path} is no MNIST file ({error}); fetch it again") from None
    return torch.tensor(values, dtype=torch.float32)


def train(engine: Engine, digits: Digits, epochs: int, world: World) -> tuple[float, float]:
    """Loss of the last epoch and accuracy on the test images, the same on every rank."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-3)
    check_optimizer(optimizer, engine.model)  # it has to be made after parallelize
    images, labels, test_images, test_labels = digits
    loss_sum = 0.0
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        loss_sum = 0.0
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[world.rank :: world.world_size]
            with engine.micro_batch(is_last=True):
                logits = engine.model(images[mine].to(world.device))
                loss = F.cross_entropy(logits, labels[mine].to(world.device), reduction="sum")
                # Gradients are sums over ranks, so the loss is divided by the whole batch.
                engine.backward(loss / len(batch))
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += float(loss.detach())
    with torch.no_grad():
        # Every rank scores all of them: each forward of a sharded model needs all ranks.
        right = (engine.model(test_images.to(world.device)).argmax(1).cpu() == test_labels).sum()
    engine.after_evaluation()
    return world.sum([loss_sum])[0] / len(images), float(right) / len(test_labels)


def parameter_bytes(model: nn.Module) -> int:
    """What this rank holds of the parameters."""
    shards = map(local_part, model.parameters())
    return sum(shard.numel() * shard.element_size() for shard in shards)


def run(engine_name: str, digits: Digits, epochs: int, world: World) -> str:
    """Train with one engine; a line of the table."""
    options = ParallelConfig(
        engine=engine_name,  # type: ignore[arg-type]
        param_dtype="fp32",
        activation_checkpointing="none",
        wrap="block" if engine_name == "ddp" else "size",
        wrap_min_parameters=10_000,
    )
    torch.manual_seed(1)
    model = ConvNet(digits[0].shape[-1])
    weights = unique_state_dict(model)  # rank 0's are taken
    began = time.perf_counter()
    engine = parallelize(model, options, world)
    engine.load_full({name: weight.clone() for name, weight in weights.items()})
    held = parameter_bytes(engine.model)
    loss, accuracy = train(engine, digits, epochs, world)
    seconds = time.perf_counter() - began
    # The optimizer keeps two moments for each parameter, the backward pass a gradient.
    return f"{engine_name:<8}{loss:>10.5f}{accuracy:>10.3f}{4 * held:>14,}{seconds:>10.1f}"


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="DDP against FSDP on handwritten digits.")
    parser.add_argument("--engines", default="ddp,fsdp1,fsdp2", help="some of them, by commas")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--mnist", type=Path, default=None, help="folder with MNIST's files")
    options = parser.parse_args()
    launch = read_launch()
    try:
        digits = load_digits(options.mnist)
        engines = options.engines.split(",")
        if unknown := set(engines) - {"ddp", "fsdp1", "fsdp2"}:
            raise UserError(f"--engines: {sorted(unknown)[0]} is none of ddp, fsdp1, fsdp2")
        world = enter_world(launch)
    except UserError as error:
        if launch.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    world.connect(timeout_seconds=120)
    if world.is_main:
        print(f"{'engine':<8}{'loss':>10}{'accuracy':>10}{'bytes a rank':>14}{'seconds':>10}")
    for name in engines:
        line = run(name, digits, options.epochs, world)
        if world.is_main:
            print(line, flush=True)
    world.disconnect()
    return 0


if __name__ == "__main__":
    leave(main())
