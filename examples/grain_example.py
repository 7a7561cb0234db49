"""Grain over planned epochs, for JAX: batches of NumPy arrays, and an iterator that goes on from what it saved.

    pip install grain
    python examples/grain_example.py URL DATASET JOB [STATE]

It stops after half an epoch and saves its place in STATE; started again it goes on with the rest.
"""

import json
import sys
from pathlib import Path

import grain
import numpy as np

import refill

url, dataset_url, job = sys.argv[1:4]
state = Path(sys.argv[4] if len(sys.argv) > 4 else "grain.json")


def as_arrays(sample: dict[str, object]) -> dict[str, object]:
    return {"x": np.asarray(sample["png"], np.float32) / 255, "y": sample["cls"], "id": sample["__id__"]}


# With JAX: rank=jax.process_index(), world_size=jax.process_count()
source = refill.GrainSource(url, dataset=dataset_url, job=job, epochs=2, decode=True, transform=as_arrays)
batches = iter(grain.MapDataset.source(source).batch(50).to_iter_dataset())
if state.exists():
    batches.set_state(json.loads(state.read_text()))

seen = []
for batch in batches:
    seen += batch["id"].tolist()  # a step of training on batch["x"] and batch["y"]
    if not state.exists() and len(seen) >= len(source) // 4:
        state.write_text(json.dumps(batches.get_state()))
        break
print(f"{len(seen)} of {len(source)} samples; {len(set(seen))} different", flush=True)
