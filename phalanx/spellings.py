"""What other programs call the options of a run, and how to say it here.

People come with the habits of HuggingFace's Trainer, accelerate, DeepSpeed and Megatron; a name from there gets the
exact words to write instead. One name per thing: these are hints, not aliases.
"""

from __future__ import annotations

import re

_GLOBAL = "--batch-size (the global batch: samples per device × devices × accumulation steps)"
_SHARDED = "--plan zero=1, zero=2 or zero=3, with dp=N for the number of replicas"
_REPORTS = "--report-to tensorboard, whose files lie in --out"

SAID_HERE = {
    "batch": "--batch-size", "tokens": "--seq-len",
    "learning_rate": "--lr", "lr_scheduler_type": "--lr-schedule", "warmup_ratio": "--warmup-steps, a number of steps",
    "num_train_epochs": "--epochs", "num_epochs": "--epochs", "max_steps": "--steps", "train_iters": "--steps",
    "max_train_steps": "--steps",
    "bf16": "--dtype bfloat16", "fp16": "--dtype float16", "mixed_precision": "--dtype bfloat16 or float16",
    "torch_dtype": "--dtype", "precision": "--dtype",
    "max_grad_norm": "--clip", "clip_grad": "--clip", "gradient_clipping": "--clip",
    "adam_beta1": "--betas BETA1 BETA2", "adam_beta2": "--betas BETA1 BETA2", "adam_epsilon": "--eps",
    "optim": "--optimizer", "optim_args": "--optimizer-options NAME=VALUE",
    "output_dir": "--out", "save": "--out", "overwrite_output_dir": "another folder with --out: none is overwritten",
    "per_device_train_batch_size": _GLOBAL, "train_batch_size": _GLOBAL, "global_batch_size": "--batch-size",
    "micro_batch_size": "--plan mb=N, the number of micro-batches per replica, beside --batch-size, the global batch",
    "per_device_eval_batch_size": "--eval-samples, how many samples an evaluation takes in all",
    "gradient_accumulation_steps": "--plan mb=N; --batch-size stays the global batch",
    "gradient_checkpointing": "--plan recompute=yes", "activation_checkpointing": "--plan recompute=yes",
    "recompute_activations": "--plan recompute=yes",
    "cpu_offload": "--plan offload=optimizer-step, offload=parameters or offload=activations",
    "offload": "--plan offload=activations, or offload=optimizer", "offload_param": "--plan offload=parameters",
    "offload_optimizer": "--plan offload=optimizer-step, or offload=optimizer",
    "optimizer_cpu_offload": "--plan offload=optimizer-step", "cpu_offloading": "--plan offload=activations",
    "logging_steps": "--log-every", "log_interval": "--log-every", "save_steps": "--checkpoint-every",
    "save_interval": "--checkpoint-every", "save_total_limit": "--keep-checkpoints", "eval_steps": "--eval-every",
    "eval_interval": "--eval-every", "max_eval_samples": "--eval-samples",
    "resume_from_checkpoint": "--resume auto, or --resume CHECKPOINT", "load": "--resume auto",
    "model_name_or_path": "--model", "model_name": "--model", "config_name": "--model",
    "tokenizer_name": "--tokenizer", "tokenizer_name_or_path": "--tokenizer",
    "dataset": "--data", "dataset_name": "--data FILE_OR_FOLDER", "train_file": "--data", "data_path": "--data",
    "validation_file": "--eval-data", "eval_dataset": "--eval-data", "dataset_text_field": "--text-key",
    "block_size": "--seq-len", "max_seq_length": "--seq-len", "max_length": "--seq-len", "max_seq_len": "--seq-len",
    "sequence_length": "--seq-len", "packing": "nothing: text is always packed; --documents keeps documents apart",
    "torch_compile": "--compile inductor", "use_cpu": "--device cpu", "no_cuda": "--device cpu",
    "fsdp": _SHARDED, "deepspeed": _SHARDED, "zero_stage": "--plan zero=1, zero=2 or zero=3",
    "tensor_parallel_size": "--plan tp=N", "tensor_model_parallel_size": "--plan tp=N",
    "pipeline_parallel_size": "--plan pp=N", "pipeline_model_parallel_size": "--plan pp=N",
    "data_parallel_size": "--plan dp=N", "nproc_per_node": "--ranks", "num_processes": "--ranks", "num_gpus": "--ranks",
    "logging_dir": _REPORTS, "mirror": "--remote URL (--mirror-every keeps copies in the memory of other ranks)",
    "ddp_timeout": "--timeout", "from_scratch": "--init fresh", "do_train": "nothing: the verb is train",
}  # fmt: skip


def said_here(name: str, *, flags: bool) -> str | None:
    """The words for an option that others call `name`; with `flags` as on the command line, else as in Python."""
    text = SAID_HERE.get(name.lstrip("-").replace("-", "_").lower())
    if text is None:
        return None
    shown = text if flags else re.sub(r"--([\w-]+)", lambda flag: flag[1].replace("-", "_"), text)
    return f"here it is {shown}"
