"""Runs in speculators' own environment: its data set class on a folder of ours, and a folder written by its own tools for us.

python speculators_states.py read FOLDER ROWS OUT      ROWS: JSON list of sample indices; OUT: the batch as safetensors
python speculators_states.py write FOLDER SAMPLES      SAMPLES: safetensors with ids.{i}, loss_mask.{i}, states.{i} (bfloat16)
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor, quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file
from speculators.data_generation.preprocessing import build_speculator_training_dataset
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn


def read(folder: Path, rows: list[int], out: Path, length: int = 40) -> None:
    """The packed batch of those samples, by its own loader, shift and collate."""
    data = ArrowDataset(length, folder, on_missing="raise", hidden_states_dtype=torch.bfloat16)
    width = data[0]["verifier_last_hidden_states"].shape[-1]
    batch = CollateFn(length, width, 3, torch.bfloat16, shift_batch)([data[i] for i in rows])
    tensors = {name: tensor.contiguous() for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
    save_file({**tensors, "lengths": torch.tensor(data.approx_lengths)}, out)


def write(folder: Path, samples: Path) -> None:
    """A data set as `prepare-data` and the eight-bit connector leave it; what its reader would make of the states goes beside it."""
    tensors = load_file(samples)
    count = sum(name.startswith("ids.") for name in tensors)
    rows = {
        "input_ids": [tensors[f"ids.{i}"].tolist() for i in range(count)],
        "loss_mask": [tensors[f"loss_mask.{i}"].tolist() for i in range(count)],
    }
    build_speculator_training_dataset(Dataset.from_dict(rows), None, num_proc=1).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    restored = {}
    for i in range(count):
        small, scale = quantize_tensor_to_fp8(tensors[f"states.{i}"])
        held = {"hidden_states": small, SCALES_KEY: scale, "token_ids": tensors[f"ids.{i}"]}
        save_file(held, folder / "hidden_states" / f"hs_{i}.safetensors")
        restored[f"states.{i}"] = dequantize_fp8_tensor(small, scale)
    save_file(restored, folder / "restored")


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
    else:
        write(Path(sys.argv[2]), Path(sys.argv[3]))
