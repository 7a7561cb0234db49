"""A stream as Hugging Face datasets has it, with columns, formats and loader workers; it goes on within an epoch.

python examples/huggingface_stream.py URL DATASET JOB
"""

import sys

from torchdata.stateful_dataloader import StatefulDataLoader

import refill

url, dataset_url, job = sys.argv[1:4]


def open_stream() -> StatefulDataLoader:
    dataset = refill.CacheDataset(url, dataset=dataset_url, job=job, decode=True)
    stream = refill.huggingface_stream(dataset, epochs=1).rename_column("cls", "label")
    return StatefulDataLoader(stream.select_columns(["png", "label", "__id__"]).with_format("torch"), 50, num_workers=2)


loader, ids = open_stream(), []
for step, batch in enumerate(loader, 1):
    ids += batch["__id__"].tolist()  # a step of training on batch["png"] and batch["label"]
    if step == 12:
        break
state = loader.state_dict()  # into a checkpoint

loader = open_stream()  # as the next process would
loader.load_state_dict(state)
ids += [number for batch in loader for number in batch["__id__"].tolist()]
print(f"{len(ids)} samples, {len(set(ids))} different", flush=True)
