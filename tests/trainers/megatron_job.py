"""Megatron's data path without GPUs: tensor parallel rank 0 reads, and sends what it has to the others of its group.

torchrun --nproc-per-node=4 megatron_job.py URL DATASET JOB TENSOR PIPELINE STEPS STATE

Groups and the iterator that can be rewound are those of megatron.core; what ``megatron.training`` does with them, which
no package has, is written down here: get_batch_on_this_tp_rank and maybe_save_dataloader_state (September 2026).
STEPS is 0 for the rest of the epoch. STATE is loaded where it is there, and saved.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from lines import tell
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from torch.distributed.device_mesh import init_device_mesh

import refill

LENGTH, BATCH, DOCUMENTS = 33, 2, 400
url, dataset_url, job, tensor, pipeline, steps, state_file = sys.argv[1:]
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(int(tensor), int(pipeline))
ranks = torch.distributed.get_world_size()
shape = (int(pipeline), ranks // int(tensor) // int(pipeline), int(tensor))
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))  # as Megatron numbers ranks


def tokens_of(sample: dict[str, Any]) -> np.ndarray:
    return np.full(5 + sample["__id__"] % 7, sample["__id__"])


mixture = refill.Mixture(url, {"docs": dataset_url}, job=job, batch_group=mesh["pp", "tp"])
lengths = {"docs": 5 + np.arange(DOCUMENTS) % 7}
packed = refill.PackedSequences(mixture, LENGTH, batch_size=BATCH, tokens=tokens_of, lengths=lengths, pad=-1)
reads = parallel_state.get_tensor_model_parallel_rank() == 0
batches = refill.MegatronBatches(packed, num_workers=1) if reads else None
state, had = Path(state_file), 0
if state.exists():
    saved = torch.load(state)
    had = saved["had"]
    if batches is not None:
        batches.load_state_dict(saved["dataloader_state_dict"])
iterator = None if batches is None else RerunDataIterator(iter(batches))
step_size = shape[1] * BATCH
steps_left = -(-(packed.packed(0).num_sequences - had) // step_size)
names = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
for _ in range(int(steps) or steps_left):
    given = None if iterator is None else next(iterator)
    batch = {}
    for name, kind in names.items():
        batch[name] = torch.empty(BATCH, LENGTH - 1, dtype=kind) if given is None else given[name]
        source = parallel_state.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(batch[name], source, group=parallel_state.get_tensor_model_parallel_group())
    assert (batch["tokens"] == batch["labels"])[batch["loss_mask"] > 0].all()
    tell(
        data=parallel_state.get_data_parallel_rank(),
        model=[parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()],
        documents=sorted({*batch["tokens"].flatten().tolist()} - {-1}),
    )
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    had += (int(steps) or steps_left) * step_size
    torch.save({"dataloader_state_dict": iterator.iterable.save_state(), "had": had}, state)  # type: ignore[union-attr]
torch.distributed.barrier()
torch.distributed.destroy_process_group()
