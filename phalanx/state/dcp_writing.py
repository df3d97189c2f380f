"""Writes a trained model as a torch.distributed.checkpoint folder, by the model's own names, for other trainers.

torch's writer takes all tensors at once, so rank 0 has the whole model in main memory for it. The folder appears whole
or not at all; `dcp.py` reads such folders, tensor by tensor.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from phalanx.state.huggingface import save_tokenizer
from phalanx.state.tensor_files import sync_folder


def write_dcp(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], config: Any = None, tokenizer: Any = None
) -> Path:  # fmt: skip
    """config, tokenizer: of a HuggingFace model, stored beside the tensors so that it can be trained on from."""
    partial = folder.parent / f".{folder.name}.writing"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        whole = {name: tensor.detach().cpu() for name, tensor in tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which is as it should be
            save(whole, storage_writer=FileSystemWriter(partial), no_dist=True)
        if config is not None:
            config.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        sync_folder(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
