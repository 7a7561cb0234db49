"""Jobs under Hugging Face's Trainer that die in mid-epoch, and go on from their last checkpoints.

huggingface_jobs.py URL DATASET FOLDER CASES, a list in JSON. All come to the step where they die, and die together.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import transformers
from lines import tell

import refill

url, dataset_url, folder, cases = sys.argv[1:]
resumed = (Path(folder) / "resumed").exists()


class Dies(BaseException):
    """At this step a job would die, if there were no other ones in its process."""


class Model(torch.nn.Module):
    """Tells what it is trained with, as a model sees it."""

    def __init__(self, job, dies_at):
        super().__init__()
        self.job, self.dies_at = job, dies_at
        self.weight = torch.nn.Linear(1, 1)
        self.trainer = []

    def forward(self, sample_id, size, labels=None):
        (trainer,) = self.trainer
        step = trainer.state.global_step
        batch = {"epoch": int(trainer.state.epoch), "step": step, "ids": sample_id.tolist()}
        tell(job=self.job, rank=trainer.args.process_index, evaluates=not self.training, **batch)
        if self.training and step == self.dies_at and not resumed:
            raise Dies
        return {"loss": self.weight(size).mean()}


class CacheTrainer(transformers.Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return refill.EpochSampler(self.train_dataset)


def as_tensors(sample):
    return {"sample_id": sample["__id__"], "size": torch.tensor([float(len(sample["bin"]))])}


def in_generator(dataset):
    """As a user of Hugging Face's datasets wraps everything."""
    import datasets

    return datasets.IterableDataset.from_generator(lambda: iter(dataset)).with_format("torch")


class SetsEpoch(transformers.TrainerCallback):
    """Trainer reaches the dataset that it was given, not what is in it."""

    def __init__(self, dataset):
        self.dataset, self.epochs = dataset, 0

    def on_epoch_begin(self, arguments, state, control, **more):
        self.dataset.set_epoch(self.epochs)
        self.epochs += 1


def run(job, dies_at=0, iterable=False, generator=False, own_sampler=False, epochs=3, **settings):
    output = str(Path(folder) / job)
    os.makedirs(output, exist_ok=True)
    arguments = transformers.TrainingArguments(
        output_dir=output,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        save_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    of_job = {"dataset": dataset_url, "job": job, "memory_bytes": 1 << 20, "transform": as_tensors}
    if iterable or generator:
        trainer_class, dataset = transformers.Trainer, refill.CacheIterableDataset(url, batch_size=16, **of_job)
    else:
        trainer_class, dataset = CacheTrainer, refill.CacheDataset(url, **of_job)
    model = Model(job, dies_at)
    callbacks = [SetsEpoch(dataset)] if generator else []
    if generator:
        dataset = in_generator(dataset)
        arguments.max_steps = -(-400 // 16) * epochs  # it has no length
    trainer_class = transformers.Trainer if own_sampler else trainer_class
    trainer = trainer_class(model, arguments, train_dataset=dataset, callbacks=callbacks)
    model.trainer.append(trainer)
    with contextlib.suppress(Dies):
        trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(output))
    if own_sampler:
        trainer.evaluate(dataset)
    return trainer  # kept, with its workers


kept = [run(**case) for case in json.loads(cases)]
if not resumed:
    # What a process has had in its last three seconds it may not have reported: going on by Trainer's own checkpoint,
    # which holds no state of the dataset, it can't say it either.
    for trained_on in (trainer.train_dataset for trainer in kept):
        connection = getattr(trained_on, "dataset", trained_on).connection
        while not connection.report_received():
            pass
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
