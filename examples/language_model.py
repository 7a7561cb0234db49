"""A small GPT on two datasets of documents, by refill.Mixture and refill.PackedSequences.

    python examples/language_model.py prepare /tmp/corpus
    refill index /tmp/corpus/code && refill index /tmp/corpus/text
    python examples/language_model.py train http://localhost:8000 run-1 file:///tmp/corpus --checkpoint /tmp/gpt.pt

Documents are the modules of Python's library and the topics of its help, a token is a byte. Stopped and started again
it goes on from its checkpoint, on any number of ranks (torchrun --nproc-per-node 2 ...).
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import struct
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

import refill

LENGTH, GLOBAL_BATCH, WIDTH = 128, 8, 64


def prepare(folder: Path) -> None:
    """Writes both datasets as Megatron does: tokens in a ``.bin``, where documents lie in an ``.idx``."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    documents = {
        "code": [path.read_bytes() for path in modules],
        "text": [text.encode() for text in pydoc_data.topics.topics.values()],
    }
    for name, found in documents.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        found = [each[:4000] for each in found if each]
        ends = [0]
        for each in found:
            ends.append(ends[-1] + len(each))
        (folder / name / "documents.bin").write_bytes(b"".join(found))
        index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 1, len(found), len(found) + 1)
        index += struct.pack(f"<{len(found)}i", *map(len, found))
        index += struct.pack(f"<{len(found)}q", *ends[:-1])
        index += struct.pack(f"<{len(ends)}q", *range(len(ends)))
        (folder / name / "documents.idx").write_bytes(index)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean loss of each next token that is of the same document."""
        tokens, segments = batch["tokens"], batch["segments"]
        found = self.tokens(tokens) + self.places(batch["positions"])
        seen = (segments[:, :, None] == segments[:, None, :]).tril()  # within a document, and not ahead
        found = self.layers(found, mask=~seen.repeat_interleave(4, dim=0))
        wanted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        losses = nn.functional.cross_entropy(self.out(found[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        return (losses * wanted).sum() / GLOBAL_BATCH / LENGTH


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    checkpoint = Path(arguments.checkpoint)
    saved: Any = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None

    mixture = refill.Mixture(
        arguments.service,
        {name: f"{arguments.corpus}/{name}" for name in ("code", "text")},
        job=arguments.job,
        weights={"code": 0.7, "text": 0.3},
        seed=1,
        resume=None if saved is None else saved["data"],
    )
    batch_size = GLOBAL_BATCH // ranks
    packed = refill.PackedSequences(mixture, LENGTH, batch_size=batch_size, window=64)
    loader: Any = torch.utils.data.DataLoader(packed, batch_size=batch_size, num_workers=1)
    loader = refill.timed(loader, packed)

    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        step = saved["step"]
        loader.load_state_dict(saved["data"])
    for batch in loader:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        if ranks > 1:
            for each in (loss, *(parameter.grad for parameter in model.parameters())):
                torch.distributed.all_reduce(each)
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step {step}: loss {loss.item().hex()} {loss.item():.4f}", flush=True)
        if step % 10 == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "step": step, "data": loader.state_dict()}, checkpoint)
        if step == arguments.crash_at:
            os._exit(1)
        if step >= arguments.steps:
            break
    if ranks > 1:
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.set_defaults(run=lambda arguments: prepare(arguments.folder))
    training = commands.add_parser("train")
    for name in ("service", "job", "corpus"):
        training.add_argument(name)
    training.add_argument("--checkpoint", required=True)
    training.add_argument("--steps", type=int, default=200)
    training.add_argument("--crash-at", type=int, default=0, help="to try it: the process ends after this step")
    training.set_defaults(run=train)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
